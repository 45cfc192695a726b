// Checks that name what failed and count; a test's main returns `checked()`.
#pragma once

#include <cstdio>
#include <string>

namespace test {

inline int failures = 0, checks = 0;
constexpr int kSkipped = 77;  // what CTest is told to take as "could not run here"

inline void check(bool ok, const std::string& what, const char* file, int line) {
  ++checks;
  if (ok) return;
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

inline int checked() {
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures || !checks ? 1 : 0;
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace test

#define CHECK(condition) test::check(condition, #condition, __FILE__, __LINE__)
#define CHECK_SAID(condition, said) \
  test::check(condition, std::string(#condition) + ", said: " + (said), __FILE__, __LINE__)
