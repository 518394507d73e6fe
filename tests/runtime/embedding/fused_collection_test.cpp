#include <torch/torch.h>

#include "runtime/embedding/tables.h"
#include "runtime/support/checks.h"

// Shows D8, D9. Compares the unsharded collections with each other, and updates with their
// definitions, written with libtorch's operators.

namespace tessera {
namespace {

using embedding::FusedOptimizer;
using test::TableOptions;

/// The optimizer state and the step of one table, by the definitions of fused_optimizer.h.
class Definition {
 public:
  Definition(const FusedOptimizer& optimizer, at::Tensor weight)
      : optimizer_(optimizer),
        weight_(std::move(weight)),
        first_(torch::zeros_like(weight_)),
        second_(torch::zeros_like(weight_)),
        row_(torch::zeros({weight_.size(0), 1})) {}

  /// `touched`: which rows the batch looks up. Shape: `[rows, 1]`, bool.
  void step(const at::Tensor& gradient, const at::Tensor& touched) {
    ++num_steps_;
    std::visit([&](const auto& each) { update(each, gradient, touched); }, optimizer_);
  }

 private:
  template <class Optimizer>
  at::Tensor clipped(const Optimizer& optimizer, const at::Tensor& gradient) const {
    if (optimizer.max_gradient == 0) return gradient;
    return gradient.clamp(-optimizer.max_gradient, optimizer.max_gradient);
  }
  template <class Optimizer>
  at::Tensor with_decay(const Optimizer& optimizer, const at::Tensor& gradient) const {
    return clipped(optimizer, gradient) + optimizer.weight_decay * weight_;
  }
  void move(const at::Tensor& by, const at::Tensor& touched) {
    weight_.sub_(torch::where(touched, by, torch::zeros_like(by)));
  }
  static void set(at::Tensor& state, const at::Tensor& value, const at::Tensor& touched) {
    state = torch::where(touched, value, state);
  }

  void update(const embedding::Sgd& o, const at::Tensor& gradient, const at::Tensor& touched) {
    move(o.lr * with_decay(o, gradient), touched);
  }
  void update(const embedding::Adagrad& o, const at::Tensor& gradient, const at::Tensor& touched) {
    const at::Tensor g = with_decay(o, gradient);
    set(second_, second_ + g * g, touched);
    move(o.lr * g / (second_.sqrt() + o.eps), touched);
  }
  void update(const embedding::RowWiseAdagrad& o, const at::Tensor& gradient,
              const at::Tensor& touched) {
    const at::Tensor g = with_decay(o, gradient);
    set(row_, row_ + (g * g).mean(1, true), touched);
    move(o.lr * g / (row_.sqrt() + o.eps), touched);
  }
  template <class AnyAdam>
  void update(const AnyAdam& o, const at::Tensor& gradient, const at::Tensor& touched) {
    const at::Tensor g = clipped(o, gradient);
    set(first_, o.beta1 * first_ + (1 - o.beta1) * g, touched);
    at::Tensor second;
    if constexpr (std::is_same_v<AnyAdam, embedding::Adam>) {
      set(second_, o.beta2 * second_ + (1 - o.beta2) * g * g, touched);
      second = second_;
    } else {
      set(row_, o.beta2 * row_ + (1 - o.beta2) * (g * g).mean(1, true), touched);
      second = row_;
    }
    const at::Tensor mean = first_ / (1 - std::pow(o.beta1, num_steps_));
    const at::Tensor scale = (second / (1 - std::pow(o.beta2, num_steps_))).sqrt() + o.eps;
    move(o.lr * (mean / scale + o.weight_decay * weight_), touched);
  }

  FusedOptimizer optimizer_;
  at::Tensor weight_;
  at::Tensor first_, second_;  // of each element
  at::Tensor row_;             // of each row
  int num_steps_ = 0;
};

/// Returns which rows of a table a batch looks up.
at::Tensor touched_rows_of(const EmbeddingBagConfig& config, const KeyedJaggedTensor& batch) {
  at::Tensor touched = torch::zeros({config.num_embeddings, 1}, at::kBool);
  for (const std::string& feature : config.feature_names) {
    touched.index_fill_(0, batch[feature].values(), true);
  }
  return touched;
}

// Shows D9.
TEST(FusedCollectionTest, UpdatesAreThoseOfTheDefinitions) {
  for (const Pooling pooling : {Pooling::sum, Pooling::mean}) {
    for (const bool is_weighted : {false, true}) {
      const TableOptions options{is_weighted, pooling};
      EmbeddingBagCollectionOptions collection;
      collection.is_weighted = is_weighted;
      for (const FusedOptimizer& optimizer : test::fused_optimizers()) {
        FusedEmbeddingBagCollection fused(test::small_tables(options), optimizer, collection);
        EmbeddingBagCollection plain = test::small_collection(options);
        std::map<std::string, Definition> definitions;
        for (const EmbeddingBagConfig& config : plain.tables().configs()) {
          definitions.try_emplace(config.name, optimizer, plain.weight(config.name).detach());
        }
        for (int step = 0; step < 4; ++step) {
          const KeyedJaggedTensor batch = test::small_batch(2, step, options);
          const KeyedTensor expected = plain.forward(batch);
          const KeyedTensor found = fused.forward(batch);
          EXPECT_EQ(found.keys(), expected.keys());
          EXPECT_TRUE(torch::allclose(found.values(), expected.values(), 1e-5, 1e-6));
          test::loss_of(found.values()).backward();
          test::loss_of(expected.values()).backward();
          const torch::NoGradGuard no_grad;
          for (const EmbeddingBagConfig& config : plain.tables().configs()) {
            at::Tensor weight = plain.weight(config.name);
            definitions.at(config.name).step(weight.grad(), touched_rows_of(config, batch));
            weight.mutable_grad() = at::Tensor();
            EXPECT_TRUE(torch::allclose(fused.weight(config.name), weight, 1e-5, 1e-6))
                << embedding::name_of(optimizer) << ", step " << step << ": " << config.name;
          }
        }
      }
    }
  }
}

// Shows D8.
TEST(FusedCollectionTest, TablesOfTwoBytesAreSummedInFloat32) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const TableOptions options{.dtype = dtype};
    FusedEmbeddingBagCollection fused(test::small_tables(options), embedding::Sgd{.lr = 0.1});
    EmbeddingBagCollection plain = test::small_collection(options);
    const KeyedJaggedTensor batch = test::small_batch(2, 0);
    const KeyedTensor pooled = fused.forward(batch);
    const KeyedTensor expected = plain.forward(batch);
    EXPECT_EQ(pooled.values().scalar_type(), at::kFloat);
    EXPECT_TRUE(torch::allclose(pooled.values(), expected.values(), 1e-6, 1e-7));
    test::loss_of(pooled.values()).backward();
    test::loss_of(expected.values()).backward();
    const torch::NoGradGuard no_grad;
    for (const std::string table : {"users", "days"}) {
      const at::Tensor weight = plain.weight(table);
      const at::Tensor moved = weight.to(at::kFloat) - 0.1 * weight.grad().to(at::kFloat);
      EXPECT_EQ(fused.weight(table).scalar_type(), dtype);
      // The plain collection rounds the gradient to the dtype, the fused one does not.
      EXPECT_TRUE(torch::allclose(fused.weight(table).to(at::kFloat), moved, 2e-2, 2e-2)) << table;
      EXPECT_FALSE(torch::equal(fused.weight(table), weight)) << table;
    }
  }
}

}  // namespace
}  // namespace tessera
