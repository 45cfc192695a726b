// Attention and its gradients on the host, from CUTLASS's numeric types and its reference GEMM; one batch and head at a
// time. `exact` computes in double. Otherwise every intermediate that a 16-bit implementation keeps is rounded, which
// says what error the operands' precision alone brings about.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/util/reference/host/gemm.h"

namespace reference {

using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using Doubles = std::vector<double>;

// c (m, n) = a (m, k) times b (k, n), in double.
template <class LayoutA, class LayoutB>
Doubles product(const Doubles& a, const Doubles& b, int m, int n, int k) {
  Doubles c(size_t(m) * n, 0.0);
  const auto leading = [](int rows, int columns, bool by_row) { return by_row ? columns : rows; };
  cutlass::TensorRef<double, LayoutA> ref_a(const_cast<double*>(a.data()),
                                            LayoutA(leading(m, k, std::is_same<LayoutA, Row>::value)));
  cutlass::TensorRef<double, LayoutB> ref_b(const_cast<double*>(b.data()),
                                            LayoutB(leading(k, n, std::is_same<LayoutB, Row>::value)));
  cutlass::TensorRef<double, Row> ref_c(c.data(), Row(n));
  cutlass::reference::host::compute_gemm<double, LayoutA, double, LayoutB, double, Row, double, double>(
      {m, n, k}, 1.0, ref_a, ref_b, 0.0, ref_c, 0.0);
  return c;
}

struct Window {
  int64_t left, right;  // keys; negative: open

  bool sees(int64_t query, int64_t key, int64_t seqlen_q, int64_t seqlen_k) const {
    const int64_t diagonal = query + seqlen_k - seqlen_q;
    return (left < 0 || key >= diagonal - left) && (right < 0 || key <= diagonal + right);
  }
};

struct Head {
  int seqlen_q, seqlen_k, headdim, headdim_v;
  Window window;
  double scale;
};

struct Result {
  Doubles out, lse, dq, dk, dv;  // rows by columns, as q, k and v
};

template <class Element>
Doubles rounded(Doubles values, bool exact) {
  if (!exact)
    for (double& x : values) x = double(float(Element(float(x))));
  return values;
}

// q (Sq, D), k (Sk, D), v (Sk, Dv), dout (Sq, Dv), dlse (Sq): values of Element. No gradients where dout is empty.
template <class Element>
Result attention(const Head& h, const Doubles& q, const Doubles& k, const Doubles& v, const Doubles& dout,
                 const Doubles& dlse, bool exact) {
  const int sq = h.seqlen_q, sk = h.seqlen_k;
  Result r;
  r.lse.assign(sq, -std::numeric_limits<double>::infinity());
  Doubles p = product<Row, Column>(q, k, sq, sk, h.headdim);  // k is (Sk, D): K^T by columns
  for (int i = 0; i < sq; ++i) {
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (int j = 0; j < sk; ++j) {
      double& s = p[size_t(i) * sk + j];
      s = h.window.sees(i, j, sq, sk) ? s * h.scale : -std::numeric_limits<double>::infinity();
      top = std::max(top, s);
    }
    for (int j = 0; j < sk; ++j) {
      double& s = p[size_t(i) * sk + j];
      s = std::isinf(top) ? 0 : std::exp(s - top);
      sum += s;
    }
    if (sum > 0) r.lse[i] = top + std::log(sum);
    for (int j = 0; j < sk && sum > 0; ++j) p[size_t(i) * sk + j] /= sum;
  }
  const Doubles p16 = rounded<Element>(p, exact);
  r.out = rounded<Element>(product<Row, Row>(p16, v, sq, h.headdim_v, sk), exact);
  if (dout.empty()) return r;
  r.dv =
      rounded<Element>(product<Column, Row>(p16, dout, sk, h.headdim_v, sq), exact);  // p is (Sq, Sk): P^T by columns
  Doubles ds = product<Row, Column>(dout, v, sq, sk, h.headdim_v);
  for (int i = 0; i < sq; ++i) {
    double delta = -dlse[i];
    for (int c = 0; c < h.headdim_v; ++c)
      delta += dout[size_t(i) * h.headdim_v + c] * r.out[size_t(i) * h.headdim_v + c];
    for (int j = 0; j < sk; ++j) ds[size_t(i) * sk + j] = p[size_t(i) * sk + j] * (ds[size_t(i) * sk + j] - delta);
  }
  ds = rounded<Element>(ds, exact);
  r.dq = product<Row, Row>(ds, k, sq, h.headdim, sk);
  r.dk = product<Column, Row>(ds, q, sk, h.headdim, sq);
  for (double& x : r.dq) x *= h.scale;
  for (double& x : r.dk) x *= h.scale;
  r.dq = rounded<Element>(r.dq, exact);
  r.dk = rounded<Element>(r.dk, exact);
  return r;
}

}  // namespace reference
