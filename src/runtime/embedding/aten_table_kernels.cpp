#include <torch/types.h>

#include <cmath>
#include <map>
#include <type_traits>

#include "embedding_kernels/fused_update.h"
#include "runtime/embedding/table_kernels.h"

namespace tessera::embedding {
namespace {

using at::Tensor;

// ---- Rows and their update.

template <class Optimizer>
constexpr bool kIsAdam = std::is_same_v<Optimizer, Adam> || std::is_same_v<Optimizer, RowWiseAdam>;

/// Some rows of a table in float32, and the same rows of each slot of its state.
struct StatefulRows {
  Tensor weight;
  std::vector<Tensor> slots;
};

/// Returns the gradients to update rows with, g in [Note: Update of a row]: `sum` is scaled and
/// clipped, and weight decay is added (not for Adam). `sum`: the sum of each row's gradients.
/// `weight`: the rows, float32.
Tensor finished_gradient(const Tensor& sum, double scale, const Tensor& weight,
                         const FusedOptimizer& optimizer) {
  return std::visit(
      [&]<class Optimizer>(const Optimizer& chosen) {
        Tensor g = scale == 1 ? sum : sum * scale;
        if (chosen.max_gradient > 0) g = g.clamp(-chosen.max_gradient, chosen.max_gradient);
        if (!kIsAdam<Optimizer> && chosen.weight_decay != 0) g = g + weight * chosen.weight_decay;
        return g;
      },
      optimizer);
}

/// Returns the rows' weights after an Adam step. `m`: the new average of gradients. `v`: the new
/// average of squares, `[n, dim]` or `[n, 1]`.
template <class AnyAdam>
Tensor adam_weight(const AnyAdam& adam, const Tensor& weight, const Tensor& m, const Tensor& v,
                   std::int64_t step) {
  const auto correction = [&](double beta) {
    return 1 / (1 - std::pow(beta, static_cast<double>(step)));
  };
  const Tensor root = (v * correction(adam.beta2)).sqrt() + adam.eps;
  return weight - (m * correction(adam.beta1) / root + weight * adam.weight_decay) * adam.lr;
}

/// Returns rows and state after a step of the optimizer. `mean_squares`: the mean of g^2 over each
/// row, `[n]`; only row-wise optimizers use it.
StatefulRows updated(const FusedOptimizer& optimizer, const StatefulRows& rows, const Tensor& g,
                     const Tensor& mean_squares, std::int64_t step) {
  return std::visit(
      [&]<class Optimizer>(const Optimizer& chosen) -> StatefulRows {
        if constexpr (std::is_same_v<Optimizer, Sgd>) {
          return {rows.weight - g * chosen.lr, {}};
        } else if constexpr (std::is_same_v<Optimizer, Adagrad>) {
          Tensor sum = rows.slots[0] + g * g;
          return {rows.weight - g * chosen.lr / (sum.sqrt() + chosen.eps), {sum}};
        } else if constexpr (std::is_same_v<Optimizer, RowWiseAdagrad>) {
          Tensor sum = rows.slots[0] + mean_squares;
          const Tensor factor = (sum.sqrt() + chosen.eps).reciprocal() * chosen.lr;
          return {rows.weight - g * factor.unsqueeze(1), {sum}};
        } else {
          constexpr bool kIsRowWise = std::is_same_v<Optimizer, RowWiseAdam>;
          Tensor m = rows.slots[0] * chosen.beta1 + g * (1 - chosen.beta1);
          const Tensor squares = kIsRowWise ? mean_squares : g * g;
          Tensor v = rows.slots[1] * chosen.beta2 + squares * (1 - chosen.beta2);
          return {adam_weight(chosen, rows.weight, m, kIsRowWise ? v.unsqueeze(1) : v, step),
                  {m, v}};
        }
      },
      optimizer);
}

Tensor mean_squares_of(const FusedOptimizer& optimizer, const Tensor& g) {
  if (!is_row_wise(optimizer)) return {};
  return (g * g).sum(1) / static_cast<double>(g.size(1));
}

// ---- Bags.

std::int64_t begin_of(const FeatureBags& bags, std::size_t feature) {
  return bags.feature_begins[feature];
}
std::int64_t num_ids_of(const FeatureBags& bags, std::size_t feature) {
  return bags.feature_begins[feature + 1] - bags.feature_begins[feature];
}

Tensor cut(const Tensor& tensor, const FeatureBags& bags, std::size_t feature) {
  return tensor.narrow(0, begin_of(bags, feature), num_ids_of(bags, feature));
}

/// Returns the index of the sample to which each id of a feature belongs. Shape: `[ids]`.
Tensor samples_of(const FeatureBags& bags, std::size_t feature) {
  const auto first_bag = static_cast<std::int64_t>(feature) * bags.num_samples;
  const Tensor ends = bags.offsets.narrow(0, first_bag + 1, bags.num_samples);
  const Tensor places =
      torch::arange(begin_of(bags, feature), begin_of(bags, feature + 1), bags.offsets.options());
  return at::searchsorted(ends, places, /*out_int32=*/false, /*right=*/true);
}

/// Calls `visit(feature, table)` for each feature that has ids.
template <class Visit>
void for_features(const FeatureBags& bags, const Visit& visit) {
  for (std::size_t feature = 0; feature < bags.table_of_feature.size(); ++feature) {
    if (num_ids_of(bags, feature) == 0) continue;
    visit(feature, static_cast<std::size_t>(bags.table_of_feature[feature]));
  }
}

// ---- The backward.

/// The ids of a batch in one table, in batch order, and for each id the summed gradient of its row.
/// If a row has several ids, all of them have the same gradient and write the same new row.
struct Occurrences {
  Tensor rows;       // [n] int64
  Tensor gradients;  // [n, dim], without the scale
};

class AtenTableBackward final : public TableBackward {
 public:
  AtenTableBackward(std::vector<TableTensors> tables, const FeatureBags& bags,
                    const OutputGradient& gradient)
      : tables_(std::move(tables)), scale_(gradient.scale) {
    struct Parts {
      std::vector<Tensor> ids, gradients;
    };
    std::vector<Parts> parts(tables_.size());
    for_features(bags, [&](std::size_t feature, std::size_t table) {
      parts[table].ids.push_back(cut(bags.ids, bags, feature));
      Tensor rows =
          gradient.rows.narrow(1, bags.column_of_feature[feature], tables_[table].weight.size(1))
              .index_select(0, samples_of(bags, feature));
      if (bags.weights.defined()) rows = rows * cut(bags.weights, bags, feature).unsqueeze(1);
      parts[table].gradients.push_back(std::move(rows));
    });
    for (std::size_t table = 0; table < tables_.size(); ++table) {
      occurrences_.push_back(parts[table].ids.empty() ? no_occurrences(tables_[table])
                                                      : summed(torch::cat(parts[table].ids),
                                                               torch::cat(parts[table].gradients)));
    }
  }

  void fused_update(std::span<const int> tables, const FusedOptimizer& optimizer) override {
    for (const int table : tables) {
      if (of(table).rows.numel() == 0) continue;
      const StatefulRows rows = rows_of(table);
      const Tensor g = finished_gradient(of(table).gradients, scale_, rows.weight, optimizer);
      write(table, updated(optimizer, rows, g, mean_squares_of(optimizer, g), step_of(table)));
    }
  }

  RowGradients row_gradients(int table, const FusedOptimizer& optimizer) override {
    const Tensor weight = tensors(table).weight.index_select(0, of(table).rows).to(at::kFloat);
    const Tensor g = finished_gradient(of(table).gradients, scale_, weight, optimizer);
    return {g, (g * g).sum(1)};
  }

  void apply_row_gradients(int table, const FusedOptimizer& optimizer,
                           const RowGradients& gradients, std::int64_t row_width) override {
    if (of(table).rows.numel() == 0) return;
    const Tensor mean_squares = gradients.squares / static_cast<double>(row_width);
    write(table, updated(optimizer, rows_of(table), gradients.rows, mean_squares, step_of(table)));
  }

  Tensor dense_gradient(int table) override {
    const Tensor& weight = tensors(table).weight;
    Tensor dense = torch::zeros(weight.sizes(), weight.options().dtype(at::kFloat));
    if (of(table).rows.numel() > 0) {
      dense.index_copy_(0, of(table).rows, of(table).gradients * scale_);
    }
    return dense;
  }

  Tensor touched_rows(int table) override { return of(table).rows; }

 private:
  static Occurrences no_occurrences(const TableTensors& table) {
    const auto options = table.weight.options();
    return {torch::empty({0}, options.dtype(at::kLong)),
            torch::empty({0, table.weight.size(1)}, options.dtype(at::kFloat))};
  }

  static Occurrences summed(const Tensor& ids, const Tensor& gradients) {
    const auto [rows, order] = at::sort(ids, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    const std::int64_t last = rows.numel() - 1;
    const Tensor is_new = rows.narrow(0, 1, last).ne(rows.narrow(0, 0, last)).to(at::kLong);
    // Both tensors have for each id the index of its row in the list of distinct rows:
    // `sorted_place` for the ids in sorted order, `place` for the ids in batch order.
    const Tensor sorted_place = torch::cat({torch::zeros({1}, ids.options()), is_new}).cumsum(0);
    const Tensor place = torch::zeros_like(sorted_place).scatter_(0, order, sorted_place);
    Tensor sums = torch::zeros_like(gradients);
    add_rows(sums, place, gradients);
    return {ids, sums.index_select(0, place)};
  }

  StatefulRows rows_of(int table) const {
    const Tensor& rows = of(table).rows;
    StatefulRows found{tensors(table).weight.index_select(0, rows).to(at::kFloat), {}};
    for (const FusedState::Slot& slot : tensors(table).state->slots) {
      found.slots.push_back(slot.tensor.index_select(0, rows));
    }
    return found;
  }

  void write(int table, const StatefulRows& updated) const {
    const Tensor& rows = of(table).rows;
    Tensor weight = tensors(table).weight;
    weight.index_copy_(0, rows, updated.weight.to(weight.scalar_type()));
    for (std::size_t i = 0; i < updated.slots.size(); ++i) {
      Tensor slot = tensors(table).state->slots[i].tensor;
      slot.index_copy_(0, rows, updated.slots[i]);
    }
  }

  const Occurrences& of(int table) const { return occurrences_[static_cast<std::size_t>(table)]; }
  const TableTensors& tensors(int table) const { return tables_[static_cast<std::size_t>(table)]; }
  std::int64_t step_of(int table) const { return tensors(table).state->step; }

  std::vector<TableTensors> tables_;
  double scale_;
  std::vector<Occurrences> occurrences_;  // one per table
};

class AtenTableKernels final : public TableKernels {
 public:
  void pooled(std::span<const TableTensors> tables, const FeatureBags& bags, Tensor& to) override {
    for (std::size_t feature = 0; feature < bags.table_of_feature.size(); ++feature) {
      const Tensor& weight =
          tables[static_cast<std::size_t>(bags.table_of_feature[feature])].weight;
      Tensor sums = to.narrow(1, bags.column_of_feature[feature], weight.size(1));
      sums.zero_();
      if (num_ids_of(bags, feature) == 0) continue;
      Tensor rows = weight.index_select(0, cut(bags.ids, bags, feature)).to(at::kFloat);
      if (bags.weights.defined()) rows = rows * cut(bags.weights, bags, feature).unsqueeze(1);
      add_rows(sums, samples_of(bags, feature), rows);
    }
  }

  Tensor sample_weight_gradients(std::span<const TableTensors> tables, const FeatureBags& bags,
                                 const OutputGradient& gradient) override {
    Tensor result = torch::zeros({bags.ids.numel()}, gradient.rows.options());
    for_features(bags, [&](std::size_t feature, std::size_t table) {
      const Tensor& weight = tables[table].weight;
      const Tensor rows = weight.index_select(0, cut(bags.ids, bags, feature)).to(at::kFloat);
      const Tensor of_bags =
          gradient.rows.narrow(1, bags.column_of_feature[feature], weight.size(1))
              .index_select(0, samples_of(bags, feature));
      cut(result, bags, feature).copy_((rows * of_bags).sum(1));
    });
    return result;
  }

  std::unique_ptr<TableBackward> backward(std::vector<TableTensors> tables, const FeatureBags& bags,
                                          const OutputGradient& gradient) override {
    return std::make_unique<AtenTableBackward>(std::move(tables), bags, gradient);
  }
};

}  // namespace

std::unique_ptr<TableKernels> aten_table_kernels() {
  return std::make_unique<AtenTableKernels>();
}

void masked_update(const TableTensors& table, const FusedOptimizer& optimizer, Tensor gradient,
                   const Tensor& is_touched) {
  StatefulRows rows{table.weight.to(at::kFloat), {}};
  for (const FusedState::Slot& slot : table.state->slots) rows.slots.push_back(slot.tensor);
  const Tensor g = finished_gradient(gradient, /*scale=*/1, rows.weight, optimizer);
  const StatefulRows next =
      updated(optimizer, rows, g, mean_squares_of(optimizer, g), table.state->step);
  const auto write = [&](Tensor to, const Tensor& from) {
    const Tensor mask = to.dim() == 2 ? is_touched.unsqueeze(1) : is_touched;
    to.copy_(torch::where(mask, from.to(to.scalar_type()), to));
  };
  write(table.weight, next.weight);
  for (std::size_t i = 0; i < next.slots.size(); ++i) {
    write(table.state->slots[i].tensor, next.slots[i]);
  }
}

}  // namespace tessera::embedding
