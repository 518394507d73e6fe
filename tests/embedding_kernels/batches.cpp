#include "embedding_kernels/batches.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "embedding_kernels/instruction_sets.h"
// After what it configures.
#include <hwy/highway.h>

#include "base/cast.h"
#include "tessera/base/dtype.h"

namespace tessera::embedding::test {

std::vector<std::byte> stored(DType dtype, std::span<const double> values) {
  std::vector<std::byte> bytes(values.size() * itemsize(dtype));
  cast_elements(DType::float64, std::as_bytes(values), dtype, bytes);
  return bytes;
}

std::vector<double> read(DType dtype, std::span<const std::byte> bytes) {
  std::vector<double> values(bytes.size() / itemsize(dtype));
  cast_elements(dtype, bytes, DType::float64, std::as_writable_bytes(std::span(values)));
  return values;
}

Table random_table(Random& random, DType dtype, std::int64_t rows, std::int64_t dim) {
  std::vector<double> values(static_cast<std::size_t>(rows * dim));
  for (double& value : values) value = static_cast<double>(random.between(-64, 65)) / 32;
  return {.dtype = dtype, .rows = rows, .dim = dim, .bytes = stored(dtype, values)};
}

std::vector<TableView> views_of(std::vector<Table>& tables) {
  std::vector<TableView> views;
  for (Table& table : tables) views.push_back(table.view());
  return views;
}

Bags Batch::bags() const {
  return {.table_of_feature = table_of_feature,
          .column_of_feature = column_of_feature,
          .batch = batch,
          .ids = ids,
          .offsets = offsets,
          .weights = weights};
}

void Batch::for_places(
    const std::function<void(std::size_t, std::int64_t, std::size_t)>& body) const {
  for (std::size_t feature = 0; feature < table_of_feature.size(); ++feature) {
    for (std::int64_t sample = 0; sample < batch; ++sample) {
      const std::size_t bag =
          feature * static_cast<std::size_t>(batch) + static_cast<std::size_t>(sample);
      for (auto place = static_cast<std::size_t>(offsets[bag]);
           place < static_cast<std::size_t>(offsets[bag + 1]); ++place) {
        body(feature, sample, place);
      }
    }
  }
}

Batch random_batch(Random& random, const std::vector<Table>& tables, const BatchShape& shape) {
  Batch batch;
  batch.table_of_feature = shape.table_of_feature;
  batch.batch = shape.batch;
  for (const int number : shape.table_of_feature) {
    const Table& table = tables[static_cast<std::size_t>(number)];
    batch.column_of_feature.push_back(batch.num_columns + shape.gap);
    batch.num_columns += table.dim + shape.gap;
    for (std::int64_t sample = 0; sample < shape.batch; ++sample) {
      const std::int64_t num_ids = table.rows == 0 ? 0 : random.between(0, shape.max_bag + 1);
      for (std::int64_t i = 0; i < num_ids; ++i) {
        const bool is_hot = random.between(0, 100) < shape.hot_percent;
        batch.ids.push_back(is_hot ? 0 : random.between(0, table.rows));
        if (shape.weights == BatchShape::Weights::random) {
          batch.weights.push_back(static_cast<float>(random.between(-8, 9)) / 4);
        }
      }
      batch.offsets.push_back(static_cast<std::int64_t>(batch.ids.size()));
    }
  }
  return batch;
}

std::vector<float> random_gradient(Random& random, const Batch& batch) {
  std::vector<float> gradient(static_cast<std::size_t>(batch.batch * batch.num_columns));
  for (float& element : gradient) element = static_cast<float>(random.between(-16, 17)) / 8;
  return gradient;
}

namespace {

/// Calls `body(place, element, at)` for each element of each place's row. `at` is where the pooled
/// output has its column.
void for_elements(const std::vector<Table>& tables, const Batch& batch,
                  const std::function<void(std::size_t, double, std::size_t)>& body) {
  std::vector<std::vector<double>> values;
  for (const Table& table : tables) values.push_back(table.values());
  batch.for_places([&](std::size_t feature, std::int64_t sample, std::size_t place) {
    const auto number = static_cast<std::size_t>(batch.table_of_feature[feature]);
    const std::int64_t dim = tables[number].dim;
    const std::int64_t first = sample * batch.num_columns + batch.column_of_feature[feature];
    for (std::int64_t k = 0; k < dim; ++k) {
      body(place, values[number][static_cast<std::size_t>(batch.ids[place] * dim + k)],
           static_cast<std::size_t>(first + k));
    }
  });
}

}  // namespace

std::vector<double> pooled_in_float64(const std::vector<Table>& tables, const Batch& batch,
                                      double untouched) {
  std::vector<double> out(static_cast<std::size_t>(batch.batch * batch.num_columns), untouched);
  for (std::size_t feature = 0; feature < batch.table_of_feature.size(); ++feature) {
    const Table& table = tables[static_cast<std::size_t>(batch.table_of_feature[feature])];
    for (std::int64_t sample = 0; sample < batch.batch; ++sample) {
      const std::int64_t first = sample * batch.num_columns + batch.column_of_feature[feature];
      std::fill_n(out.begin() + first, table.dim, 0);
    }
  }
  for_elements(tables, batch, [&](std::size_t place, double weight, std::size_t at) {
    out[at] += static_cast<double>(batch.weight(place)) * weight;
  });
  return out;
}

std::vector<double> weight_gradients_in_float64(const std::vector<Table>& tables,
                                                const Batch& batch,
                                                const std::vector<float>& gradient) {
  std::vector<double> out(batch.ids.size());
  for_elements(tables, batch, [&](std::size_t place, double weight, std::size_t at) {
    out[place] += weight * static_cast<double>(gradient[at]);
  });
  return out;
}

void with_every_instruction_set(const std::function<void()>& body) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

double precision(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return 0x1p-11;
    case DType::bfloat16:
      return 0x1p-8;
    default:
      return 0x1p-24;
  }
}

}  // namespace tessera::embedding::test
