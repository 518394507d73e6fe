// The formulas of fused_optimizer.h for one row, with the SIMD vectors of one instruction set.
#if defined(TESSERA_EMBEDDING_KERNELS_UPDATE_RULES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_EMBEDDING_KERNELS_UPDATE_RULES_INL_H_
#undef TESSERA_EMBEDDING_KERNELS_UPDATE_RULES_INL_H_
#else
#define TESSERA_EMBEDDING_KERNELS_UPDATE_RULES_INL_H_
#endif

#include <cmath>

#include "embedding_kernels/fused_update.h"
#include "embedding_kernels/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::embedding::HWY_NAMESPACE {

// An update rule is a class with `prefetch(row, dim)`, which prefetches optimizer state, and
// `update(w, g, row, dim, mean_square)`, which updates the weights `w` of row number `row`. `g` is
// the g of [Note: Update of a row] (fused_update.h): scaled, clipped and, except for Adam and
// RowWiseAdam, with weight decay. Only row-wise rules use `mean_square`.

/// w -= factor * g
template <class T>
HWY_INLINE void subtract(T* w, const float* g, std::int64_t dim, float factor) {
  for_columns(dim, [&](auto d, std::int64_t column) HWY_ATTR {
    const auto next = hn::NegMulAdd(hn::Set(d, factor), load(d, g + column), load(d, w + column));
    store(d, next, w + column);
  });
}

struct SgdRule {
  static constexpr bool kIsRowWise = false;
  float lr;

  SgdRule(const Sgd& sgd, const OptimizerState& /*state*/) : lr(static_cast<float>(sgd.lr)) {}

  HWY_INLINE void prefetch(std::int64_t /*row*/, std::int64_t /*dim*/) const {}

  template <class T>
  HWY_INLINE void update(T* w, const float* g, std::int64_t /*row*/, std::int64_t dim,
                         float /*mean_square*/) const {
    subtract(w, g, dim, lr);
  }
};

struct AdagradRule {
  static constexpr bool kIsRowWise = false;
  float lr;
  float eps;
  float* sums;

  AdagradRule(const Adagrad& adagrad, const OptimizerState& state)
      : lr(static_cast<float>(adagrad.lr)), eps(static_cast<float>(adagrad.eps)), sums(state.sum) {}

  HWY_INLINE void prefetch(std::int64_t row, std::int64_t dim) const {
    prefetch_to_write(sums + row * dim, dim);
  }

  template <class T>
  HWY_INLINE void update(T* w, const float* g, std::int64_t row, std::int64_t dim,
                         float /*mean_square*/) const {
    float* row_sums = sums + row * dim;
    for_columns(dim, [&](auto d, std::int64_t column) HWY_ATTR {
      const auto gradient = load(d, g + column);
      const auto sum = hn::MulAdd(gradient, gradient, load(d, row_sums + column));
      store(d, sum, row_sums + column);
      const auto root = hn::Add(hn::Sqrt(sum), hn::Set(d, eps));
      const auto step = hn::Div(hn::Mul(hn::Set(d, lr), gradient), root);
      store(d, hn::Sub(load(d, w + column), step), w + column);
    });
  }
};

struct RowWiseAdagradRule {
  static constexpr bool kIsRowWise = true;
  float lr;
  float eps;
  float* row_sums;

  RowWiseAdagradRule(const RowWiseAdagrad& adagrad, const OptimizerState& state)
      : lr(static_cast<float>(adagrad.lr)),
        eps(static_cast<float>(adagrad.eps)),
        row_sums(state.row_sum) {}

  HWY_INLINE void prefetch(std::int64_t row, std::int64_t /*dim*/) const {
    prefetch_to_write(row_sums + row, 1);
  }

  template <class T>
  HWY_INLINE void update(T* w, const float* g, std::int64_t row, std::int64_t dim,
                         float mean_square) const {
    row_sums[row] += mean_square;
    subtract(w, g, dim, lr / (std::sqrt(row_sums[row]) + eps));
  }
};

/// The factors that Adam and RowWiseAdam share.
struct AdamFactors {
  float lr;
  float beta1;
  float beta2;
  float rest1;  // 1 - beta1, computed before rounding to float
  float rest2;
  float eps;
  float weight_decay;
  float correction1;  // 1 / (1 - beta1^t)
  float correction2;

  template <class AnyAdam>
  AdamFactors(const AnyAdam& adam, std::int64_t step)
      : lr(static_cast<float>(adam.lr)),
        beta1(static_cast<float>(adam.beta1)),
        beta2(static_cast<float>(adam.beta2)),
        rest1(static_cast<float>(1 - adam.beta1)),
        rest2(static_cast<float>(1 - adam.beta2)),
        eps(static_cast<float>(adam.eps)),
        weight_decay(static_cast<float>(adam.weight_decay)),
        correction1(static_cast<float>(1 / (1 - std::pow(adam.beta1, static_cast<double>(step))))),
        correction2(static_cast<float>(1 / (1 - std::pow(adam.beta2, static_cast<double>(step))))) {
  }

  /// Returns the new average of gradients, m, of some columns.
  template <class D>
  HWY_INLINE hn::Vec<D> next_average(D d, hn::Vec<D> m, hn::Vec<D> g) const {
    return hn::MulAdd(hn::Set(d, beta1), m, hn::Mul(hn::Set(d, rest1), g));
  }

  /// Returns the new weights of some columns. `root` is sqrt(v / (1 - beta2^t)) + eps.
  template <class D>
  HWY_INLINE hn::Vec<D> next_weight(D d, hn::Vec<D> w, hn::Vec<D> m, hn::Vec<D> root) const {
    const auto scaled = hn::Div(hn::Mul(m, hn::Set(d, correction1)), root);
    const auto decayed = hn::MulAdd(hn::Set(d, weight_decay), w, scaled);
    return hn::NegMulAdd(hn::Set(d, lr), decayed, w);
  }
};

struct AdamRule {
  static constexpr bool kIsRowWise = false;
  AdamFactors factors;
  float* averages;
  float* square_averages;

  AdamRule(const Adam& adam, const OptimizerState& state)
      : factors(adam, state.step), averages(state.exp_avg), square_averages(state.exp_avg_sq) {}

  HWY_INLINE void prefetch(std::int64_t row, std::int64_t dim) const {
    prefetch_to_write(averages + row * dim, dim);
    prefetch_to_write(square_averages + row * dim, dim);
  }

  template <class T>
  HWY_INLINE void update(T* w, const float* g, std::int64_t row, std::int64_t dim,
                         float /*mean_square*/) const {
    float* m_row = averages + row * dim;
    float* v_row = square_averages + row * dim;
    for_columns(dim, [&](auto d, std::int64_t column) HWY_ATTR {
      const auto gradient = load(d, g + column);
      const auto m = factors.next_average(d, load(d, m_row + column), gradient);
      store(d, m, m_row + column);
      const auto square = hn::Mul(gradient, gradient);
      const auto v = hn::MulAdd(hn::Set(d, factors.beta2), load(d, v_row + column),
                                hn::Mul(hn::Set(d, factors.rest2), square));
      store(d, v, v_row + column);
      const auto root =
          hn::Add(hn::Sqrt(hn::Mul(v, hn::Set(d, factors.correction2))), hn::Set(d, factors.eps));
      store(d, factors.next_weight(d, load(d, w + column), m, root), w + column);
    });
  }
};

struct RowWiseAdamRule {
  static constexpr bool kIsRowWise = true;
  AdamFactors factors;
  float* averages;
  float* row_square_averages;

  RowWiseAdamRule(const RowWiseAdam& adam, const OptimizerState& state)
      : factors(adam, state.step),
        averages(state.exp_avg),
        row_square_averages(state.row_exp_avg_sq) {}

  HWY_INLINE void prefetch(std::int64_t row, std::int64_t dim) const {
    prefetch_to_write(averages + row * dim, dim);
    prefetch_to_write(row_square_averages + row, 1);
  }

  template <class T>
  HWY_INLINE void update(T* w, const float* g, std::int64_t row, std::int64_t dim,
                         float mean_square) const {
    float& v = row_square_averages[row];
    v = factors.beta2 * v + factors.rest2 * mean_square;
    const float root = std::sqrt(v * factors.correction2) + factors.eps;
    float* m_row = averages + row * dim;
    for_columns(dim, [&](auto d, std::int64_t column) HWY_ATTR {
      const auto m = factors.next_average(d, load(d, m_row + column), load(d, g + column));
      store(d, m, m_row + column);
      store(d, factors.next_weight(d, load(d, w + column), m, hn::Set(d, root)), w + column);
    });
  }
};

inline SgdRule rule_of(const Sgd& sgd, const OptimizerState& state) {
  return {sgd, state};
}
inline AdagradRule rule_of(const Adagrad& adagrad, const OptimizerState& state) {
  return {adagrad, state};
}
inline RowWiseAdagradRule rule_of(const RowWiseAdagrad& adagrad, const OptimizerState& state) {
  return {adagrad, state};
}
inline AdamRule rule_of(const Adam& adam, const OptimizerState& state) {
  return {adam, state};
}
inline RowWiseAdamRule rule_of(const RowWiseAdam& adam, const OptimizerState& state) {
  return {adam, state};
}

}  // namespace tessera::embedding::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
