// The reference of the GPU tests, judged by itself: gradients against differences, rows without a key, rounding.
#include <cmath>
#include <random>

#include "check.hpp"
#include "reference.hpp"

namespace {

using reference::Doubles;
using Half = cutlass::half_t;

Doubles numbers(size_t count, int seed) {
  std::mt19937 source(seed);
  std::normal_distribution<float> normal;
  Doubles made(count);
  for (double& x : made) x = double(float(Half(normal(source))));
  return made;
}

double dot(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void gradients(reference::Window window) {
  const reference::Head h{7, 9, 8, 16, window, 0.3};
  Doubles in[] = {numbers(7 * 8, 1), numbers(9 * 8, 2), numbers(9 * 16, 3)};
  const Doubles dout = numbers(7 * 16, 4), dlse = numbers(7, 5);
  const auto run = [&] { return reference::attention<Half>(h, in[0], in[1], in[2], dout, dlse, true); };
  const auto loss = [&] {
    const reference::Result r = run();
    return dot(r.out, dout) + dot(r.lse, dlse);
  };
  const reference::Result at = run();
  const Doubles* gradient[] = {&at.dq, &at.dk, &at.dv};
  for (int which = 0; which < 3; ++which)
    for (size_t i = 0; i < in[which].size(); ++i) {
      const double step = 1e-5, before = in[which][i];
      in[which][i] = before + step;
      double difference = loss();
      in[which][i] = before - step;
      difference = (difference - loss()) / (2 * step);
      in[which][i] = before;
      CHECK(std::abs(difference - (*gradient[which])[i]) < 1e-7);
    }
}

void rows_without_keys() {
  const reference::Head h{5, 3, 8, 8, {-1, 0}, 1.0};  // causal, bottom right: queries 0 and 1 see no key
  const auto r = reference::attention<Half>(h, numbers(40, 1), numbers(24, 2), numbers(24, 3), numbers(40, 4),
                                            Doubles(5, 0.0), true);
  CHECK(std::isinf(r.lse[0]) && std::isinf(r.lse[1]) && std::isfinite(r.lse[2]));
  for (int c = 0; c < 16; ++c) CHECK(r.out[c] == 0 && r.dq[c] == 0);
  for (int c = 0; c < 8; ++c) CHECK(std::abs(r.out[16 + c] - numbers(24, 3)[c]) < 1e-12);  // query 2 sees key 0 alone
}

void rounding() {
  const reference::Head h{16, 16, 8, 8, {-1, -1}, 0.5};
  const auto run = [&](bool exact) {
    return reference::attention<Half>(h, numbers(128, 1), numbers(128, 2), numbers(128, 3), numbers(128, 4),
                                      Doubles(16, 0.0), exact);
  };
  const auto exact = run(true), plain = run(false);
  double most = 0;
  for (size_t i = 0; i < exact.out.size(); ++i) most = std::max(most, std::abs(exact.out[i] - plain.out[i]));
  CHECK(most > 1e-6 && most < 1e-2);
}

}  // namespace

int main() {
  gradients({-1, -1});
  gradients({-1, 2});
  gradients({3, 1});
  rows_without_keys();
  rounding();
  return test::checked();
}
