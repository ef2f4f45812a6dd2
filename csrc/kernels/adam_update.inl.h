// SPDX-License-Identifier: Apache-2.0
// The Adam and AdamW update of one element (or one vector of elements), for CPU and CUDA alike; see
// adam_math.h for its source. No include guard: each instruction set includes it inside its own
// namespace and target region, after kernels/adam_math.h and kernels/macros.h.

/// Updates parameter `p` and moments `m`, `v` from gradient `g`. `Math` supplies the type `Value`
/// and the correctly rounded operations set1, mul, fma, sqrt and div on it, so that every
/// implementation gives the same bits.
template <class Math, class Value = typename Math::Value>
PEFTDS_HOST_DEVICE void adam_update(Value g, Value& p, Value& m, Value& v, const AdamCoefficients& c) {
  g = Math::mul(g, Math::set1(c.grad_scale));
  if (c.l2 != 0.0f) g = Math::fma(p, Math::set1(c.l2), g);
  m = Math::fma(g, Math::set1(c.one_minus_beta1), Math::mul(m, Math::set1(c.beta1)));
  v = Math::fma(Math::mul(g, g), Math::set1(c.one_minus_beta2), Math::mul(v, Math::set1(c.beta2)));
  const Value denominator = Math::fma(Math::sqrt(v), Math::set1(c.inv_sqrt_correction2), Math::set1(c.eps));
  if (c.negative_decay != 0.0f) p = Math::fma(p, Math::set1(c.negative_decay), p);
  p = Math::fma(Math::div(m, denominator), Math::set1(c.negative_step_size), p);
}
