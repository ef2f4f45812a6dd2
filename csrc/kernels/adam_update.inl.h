// SPDX-License-Identifier: Apache-2.0
// The Adam and AdamW update of one element (or one vector of elements), for CPU and CUDA alike; see
// adam_math.h for its source. No include guard: each instruction set includes it inside its own
// namespace and target region, after kernels/adam_math.h and kernels/macros.h.

/// Updates parameter `p` and moments `m`, `v` from gradient `g`. `Math` supplies the type `Value`
/// and the correctly rounded operations set1, mul, fma, sqrt and div on it, so that every
/// implementation gives the same bits.
template <class Math, class Value = typename Math::Value>
PEFTDS_HOST_DEVICE void adam_update(Value g, Value& p, Value& m, Value& v, const AdamCoefficients& c) {
  const Value minus_one = Math::set1(-1.0f);
  g = Math::mul(g, Math::set1(c.grad_scale));
  if (c.l2 != 0.0f) g = Math::fma(p, Math::set1(c.l2), g);
  // Written as x + (1 - beta) * (new - x), because fp32 holds 1 - beta far better than a beta near 1:
  // 0.999 is off by 1.3e-8, which adds up to 1.3e-5 of v. Below beta = 1/2 that form would cancel.
  if (c.one_minus_beta1 < 0.5f) {
    m = Math::fma(Math::fma(m, minus_one, g), Math::set1(c.one_minus_beta1), m);
  } else {
    m = Math::fma(g, Math::set1(c.one_minus_beta1), Math::mul(m, Math::set1(c.beta1)));
  }
  if (c.one_minus_beta2 < 0.5f) {
    v = Math::fma(Math::fma(g, g, Math::mul(v, minus_one)), Math::set1(c.one_minus_beta2), v);
  } else {
    v = Math::fma(Math::mul(g, g), Math::set1(c.one_minus_beta2), Math::mul(v, Math::set1(c.beta2)));
  }
  const Value denominator = Math::fma(Math::sqrt(v), Math::set1(c.inv_sqrt_correction2), Math::set1(c.eps));
  const Value ratio = Math::div(m, denominator);
  const Value step_size = Math::set1(c.negative_step_size);
  if (c.negative_decay == 0.0f) {
    p = Math::fma(ratio, step_size, p);
  } else {  // decay and step are added up first: two roundings at the size of `p` would drift
    const Value change = Math::fma(ratio, step_size, Math::mul(p, Math::set1(c.negative_decay)));
    p = Math::fma(change, Math::set1(1.0f), p);
  }
}
