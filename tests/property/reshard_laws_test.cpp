#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "property/generators.h"
#include "reshard/resharding.h"

namespace tessera::reshard {
namespace {

using formats::Format;
using test::arbitrary_shape;
using test::arbitrary_strategy;
using test::Bytes;
using test::counting_bytes;
using test::MemoryCheckpoint;

/// A model of a few parameters with pointwise and scalar state, and the units of the parameters.
MemoryCheckpoint arbitrary_checkpoint() {
  MemoryCheckpoint checkpoint("source");
  std::vector<std::pair<std::string, Shape>> parameters;
  const std::int64_t num_parameters = test::pick(1, 3);
  for (std::int64_t i = 0; i < num_parameters; ++i) {
    const std::string name = "p" + std::to_string(i);
    const Shape shape = *arbitrary_shape();
    const auto nbytes = static_cast<std::size_t>(numel_of(shape)) * 4;
    const auto seed = static_cast<unsigned>(i);
    checkpoint.add({"model." + name, DType::float32, shape}, counting_bytes(nbytes, seed));
    checkpoint.add({"optim.state." + name + ".exp_avg", DType::float32, shape},
                   counting_bytes(nbytes, seed + 7));
    checkpoint.add({"optim.state." + name + ".step", DType::float32, {}},
                   counting_bytes(4, seed + 9));
    parameters.emplace_back("model." + name, shape);
  }
  checkpoint.contents_for_change().units = {
      make_flat_unit("root", DType::float32, std::move(parameters))};
  return checkpoint;
}

PlanOptions arbitrary_layout() {
  PlanOptions options;
  options.strategy = *arbitrary_strategy();
  if (!options.strategy.starts_with("hybrid"))
    options.world_size = static_cast<int>(test::pick(1, 12));
  options.format = *rc::gen::element(Format::native, Format::dcp);
  return options;
}

void assert_equal(const formats::CheckpointReader& a, const formats::CheckpointReader& b) {
  RC_ASSERT(a.contents().tensors.size() == b.contents().tensors.size());
  for (std::size_t i = 0; i < a.contents().tensors.size(); ++i) {
    RC_ASSERT(a.contents().tensors[i].meta == b.contents().tensors[i].meta);
    RC_ASSERT(test::whole_tensor(a, i) == test::whole_tensor(b, i));
  }
}

// Shows A4.
RC_GTEST_PROP(ReshardLaws, EveryLayoutHoldsTheSameState, ()) {
  const MemoryCheckpoint source = arbitrary_checkpoint();
  assert_equal(source, reshard_in_memory(source, arbitrary_layout()));
}

RC_GTEST_PROP(ReshardLaws, EveryLayoutCoversEveryTensorOnce, ()) {
  const MemoryCheckpoint source = arbitrary_checkpoint();
  const Plan plan = plan_reshard(source.contents(), "source", arbitrary_layout());
  for (const formats::TensorEntry& tensor : plan.destination.tensors) {
    std::vector<Region> regions;
    for (const formats::Piece& piece : tensor.pieces) {
      regions.push_back(piece.region);
      RC_ASSERT(piece.rank >= 0 && piece.rank < plan.destination.world_size);
    }
    RC_ASSERT(std::set<Region>(regions.begin(), regions.end()).size() == regions.size());
    RC_ASSERT(check_coverage(regions, tensor.meta.shape).empty());
  }
}

RC_GTEST_PROP(ReshardLaws, ThereAndBackIsIdentityPieceByPiece, ()) {
  const MemoryCheckpoint source = arbitrary_checkpoint();
  PlanOptions there = arbitrary_layout();
  PlanOptions elsewhere = arbitrary_layout();
  there.units = elsewhere.units = source.contents().units;  // DCP does not keep them
  const MemoryCheckpoint a = reshard_in_memory(source, there);
  const MemoryCheckpoint b = reshard_in_memory(a, elsewhere);
  const MemoryCheckpoint back = reshard_in_memory(b, there);
  const MemoryCheckpoint direct = reshard_in_memory(source, elsewhere);
  assert_equal(a, back);
  assert_equal(b, direct);
  for (std::size_t i = 0; i < a.contents().tensors.size(); ++i) {
    const auto& before = a.contents().tensors[i].pieces;
    const auto& after = back.contents().tensors[i].pieces;
    RC_ASSERT(before.size() == after.size());
    for (std::size_t p = 0; p < before.size(); ++p) {
      RC_ASSERT(before[p].region == after[p].region);
      RC_ASSERT(before[p].rank == after[p].rank);
    }
  }
}

// Shows D9.
RC_GTEST_PROP(ReshardLaws, EveryTablePlanHoldsTheSameTablesAndRowWiseState, ()) {
  MemoryCheckpoint source("source");
  const std::vector<std::string> tables{"t0", "t1"};
  for (const std::string& table : tables) {
    const Shape shape{test::pick(0, 9), test::pick(1, 6)};
    const std::string weight = "embedding_bags." + table + ".weight";
    const auto rows = static_cast<std::size_t>(shape[0]);
    const auto columns = static_cast<std::size_t>(shape[1]);
    source.add({"model." + weight, DType::float32, shape}, counting_bytes(rows * columns * 4));
    const std::string state = "optim.state." + weight + ".sum_of_rows";
    formats::TensorEntry& entry =
        source.add({state, DType::float32, {shape[0]}}, counting_bytes(rows * 4, 3));
    entry.kind = formats::StateKind::row_wise;
    entry.parameter = "model." + weight;
  }
  PlanOptions options;
  options.table_plan = *test::arbitrary_table_plan(tables);
  const MemoryCheckpoint there = reshard_in_memory(source, options);
  assert_equal(source, there);
  options.table_plan = *test::arbitrary_table_plan(tables);
  assert_equal(source, reshard_in_memory(there, options));
}

}  // namespace
}  // namespace tessera::reshard
