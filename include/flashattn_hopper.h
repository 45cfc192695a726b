/* flashattn_hopper: exact attention, forward and backward, from kernels that were compiled ahead of time.
 *
 *   fah_problem_init -> fill in the problem -> fah_plan_create -> fah_plan_workspace
 *   -> fah_forward or fah_backward, as often as wanted -> fah_plan_destroy
 *
 * A plan never changes: threads may share it. Launches are asynchronous, on the stream that they are given. Tensors are
 * in device memory, (batch, seqlen, heads, headdim), headdim contiguous, base addresses multiples of 16 bytes.
 * docs/native.md has the whole story and a program.
 */
#ifndef FLASHATTN_HOPPER_H
#define FLASHATTN_HOPPER_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FAH_API __attribute__((visibility("default")))
#else
#define FAH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fah_status {
  FAH_OK = 0,
  FAH_INVALID_ARGUMENT = 1, /* a null pointer, an extent, a stride, an address: the call is wrong */
  FAH_UNSUPPORTED = 2,      /* no kernel of the catalog runs this; the message has the reason of each */
  FAH_NOT_IN_LIBRARY = 3,   /* the catalog's kernel for this was not compiled into this library */
  FAH_NO_DEVICE = 4,        /* no driver, no GPU, or no such device */
  FAH_CUDA_ERROR = 5,       /* the driver, or a launch, failed */
  FAH_OUT_OF_MEMORY = 6,    /* of the host */
  FAH_INTERNAL_ERROR = 7    /* a fault of this library */
} fah_status;

typedef enum fah_dtype { FAH_BF16 = 1, FAH_FP16 = 2 } fah_dtype;
typedef enum fah_pass { FAH_FORWARD = 1, FAH_BACKWARD = 2 } fah_pass;

/* What products are computed in: the dtype of the tensors, or 8 bits. FAH_FP8 quantizes q, k and v in every call: a
 * forward on a Hopper GPU, whose workspace holds the codes. */
typedef enum fah_precision { FAH_16_BIT = 0, FAH_FP8 = 1 } fah_precision;

/* FAH_DEFAULT_CODES: by headdim, as Python's precision="fp8". int8 is more accurate, e4m3 mostly faster. */
typedef enum fah_codes { FAH_DEFAULT_CODES = 0, FAH_INT8 = 1, FAH_E4M3 = 2 } fah_codes;

/* dk and dv are computed together. */
typedef enum fah_gradients { FAH_DQ_DK_DV = 0, FAH_DQ = 1, FAH_DK_DV = 2 } fah_gradients;

#define FAH_OPEN (-1)       /* a side of the window without an edge */
#define FAH_NO_ORDINAL (-1) /* plan for an architecture without its device; such a plan cannot be launched */

/* What is asked. Begin with fah_problem_init, so that a field of a later version has its default.
 *
 * Query i of seqlen_q sees the keys from window_left before to window_right behind its diagonal, both inclusive, which
 * is key i + seqlen_k - seqlen_q. Causal attention is (FAH_OPEN, 0), full attention (FAH_OPEN, FAH_OPEN).
 * Strides are in elements, for batch, seqlen and head: multiples of 8, 0 to repeat; three zeros mean contiguous.
 */
typedef struct fah_problem {
  size_t size; /* of this struct; set by fah_problem_init */
  fah_pass pass;
  fah_dtype dtype; /* of every tensor but lse, dlse and the workspace, whatever the precision */
  int32_t device;  /* CUDA ordinal, or FAH_NO_ORDINAL; 0 */
  int32_t arch;    /* 10 * major + minor of the compute capability, with FAH_NO_ORDINAL only; 0: ask the device */
  int32_t batch, seqlen_q, seqlen_k;
  int32_t num_heads_q, num_heads_kv; /* query head h reads key and value head h / (num_heads_q / num_heads_kv) */
  int32_t headdim, headdim_v;        /* of q and k, of v and out; 0 for headdim_v: as headdim */
  int64_t q_strides[3], k_strides[3], v_strides[3];
  int64_t dout_strides[3];           /* backward only */
  int64_t window_left, window_right; /* keys; FAH_OPEN */
  float softmax_scale;               /* 0: 1 / sqrt(headdim) */
  int32_t deterministic;             /* not 0: results repeat bit by bit */
  const char* backend;               /* "auto", or the part of a kernel's name before the dot; NULL is "auto" */
  fah_precision precision;           /* FAH_16_BIT */
  fah_codes qk_codes;                /* FAH_FP8 only: codes of q and k, FAH_DEFAULT_CODES; those of v are e4m3 */
  int32_t hadamard;                  /* FAH_FP8 only: not 0, the default: q and k are rotated before they are rounded */
  int32_t smooth_k;        /* FAH_FP8 only: not 0, the default: the mean of k is subtracted; lse gets it back */
  fah_gradients gradients; /* backward only: those that are written, FAH_DQ_DK_DV */
} fah_problem;

typedef struct fah_plan fah_plan;

/* What a launch needs beside its tensors. The same memory may serve many launches of a plan, one after the other on one
 * stream; another plan may have it once the first `zeroed` bytes that this one needs are zeros again.
 */
typedef struct fah_workspace {
  size_t bytes;     /* 0: none */
  size_t alignment; /* of its address */
  size_t zeroed;    /* bytes at its start that are zeros before its first launch; every launch leaves them so */
} fah_workspace;

typedef struct fah_forward_args {
  const void *q, *k, *v;
  void* out;  /* (batch, seqlen_q, num_heads_q, headdim_v), contiguous */
  float* lse; /* (batch, num_heads_q, seqlen_q), contiguous, natural log; NULL: not wanted */
  void* workspace;
} fah_forward_args;

/* out and lse are what the forward wrote. Gradients are contiguous, with the shapes of q, k and v; addresses of those
 * that the plan is not for are ignored. */
typedef struct fah_backward_args {
  const void *dout, *q, *k, *v, *out;
  const float* lse;
  const float* dlse; /* gradient of lse; NULL: none */
  void *dq, *dk, *dv;
  void* workspace;
} fah_backward_args;

/* Every field with its default: forward, BF16, device 0, full attention, contiguous tensors. */
FAH_API void fah_problem_init(fah_problem* problem);

/* Chooses the kernel. *plan is NULL unless FAH_OK is returned. */
FAH_API fah_status fah_plan_create(const fah_problem* problem, fah_plan** plan);
FAH_API void fah_plan_destroy(fah_plan* plan); /* NULL is nothing to do */
FAH_API fah_status fah_plan_workspace(const fah_plan* plan, fah_workspace* workspace);

/* The kernel that runs and how it cuts the work, for logs; valid as long as the plan. NULL for NULL. */
FAH_API const char* fah_plan_variant(const fah_plan* plan);
FAH_API const char* fah_plan_tile(const fah_plan* plan);
FAH_API const char* fah_plan_quantizer(const fah_plan* plan); /* what makes the codes of FAH_FP8, else NULL */

/* `stream` is a CUstream or cudaStream_t of the plan's device; NULL is the default stream. A variant's first launch
 * in a process loads its code to the device, so it must not be captured into a graph. */
FAH_API fah_status fah_forward(const fah_plan* plan, const fah_forward_args* args, void* stream);
FAH_API fah_status fah_backward(const fah_plan* plan, const fah_backward_args* args, void* stream);

/* What went wrong in this thread's latest call that failed; "" before the first. Valid until the next one fails. */
FAH_API const char* fah_last_error(void);
FAH_API const char* fah_status_name(fah_status status);
FAH_API const char* fah_version(void);

/* The variants in this library, by index from 0; NULL beyond the last. */
FAH_API const char* fah_library_variant(size_t index);

#ifdef __cplusplus
}
#endif
#endif
