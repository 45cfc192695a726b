/* The header is C: it compiles as C99 without a warning, and a C program can plan. */
#include <stdio.h>
#include <string.h>

#include "flashattn_hopper.h"

int main(void) {
  fah_problem problem;
  fah_plan* plan = NULL;
  fah_workspace workspace;
  fah_problem_init(&problem);
  if (problem.size != sizeof(problem) || problem.window_left != FAH_OPEN) return 1;
  problem.device = FAH_NO_ORDINAL;
  problem.arch = 90;
  problem.batch = 1;
  problem.seqlen_q = problem.seqlen_k = 2048;
  problem.num_heads_q = problem.num_heads_kv = 4;
  problem.headdim = 64;
  problem.window_right = 0;
  if (fah_plan_create(&problem, &plan) != FAH_OK) {
    fprintf(stderr, "%s\n", fah_last_error());
    return 1;
  }
  if (fah_plan_workspace(plan, &workspace) != FAH_OK) return 1;
  printf("flashattn_hopper %s: %s, %s, %zu bytes\n", fah_version(), fah_plan_variant(plan), fah_plan_tile(plan),
         workspace.bytes);
  if (strncmp(fah_plan_variant(plan), "sm_90a:", 7) != 0) return 1;
  fah_plan_destroy(plan);
  return 0;
}
