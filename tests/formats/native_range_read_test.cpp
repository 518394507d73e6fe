#include <gtest/gtest.h>

#include "formats/native_checkpoint.h"
#include "support/fault_file_system.h"
#include "support/memory_checkpoint.h"
#include "support/temporary_directory.h"
#include "tessera/formats/native.h"
#include "tessera/layout/strategy.h"

namespace tessera::formats {
namespace {

using test::MemoryCheckpoint;

constexpr std::uint64_t kPlainBlockNbytes = std::uint64_t{64} << 10;
constexpr std::uint64_t kChunkNbytes = std::uint64_t{1} << 20;

struct Shape2d {
  const char* fqn;
  std::int64_t rows;
  std::int64_t columns;
};
constexpr Shape2d kTensors[] = {{"embedding", 40'001, 48}, {"up", 2'731, 512}, {"norm", 1, 512}};

/// A model of about 13 MB, in rows over four ranks.
MemoryCheckpoint model_on_four_ranks() {
  test::Random random(7);
  MemoryCheckpoint model("memory", 4);
  const Strategy source = parse_strategy("dim0", 4);
  for (const auto& [fqn, rows, columns] : kTensors) {
    const Shape shape = {rows, columns};
    std::vector<Piece> pieces;
    for (const Shard& shard : shards_of(source, shape)) {
      pieces.push_back({shard.region, shard.ranks.front()});
    }
    model.add({fqn, DType::float32, shape},
              test::weight_like_bytes(static_cast<std::uint64_t>(rows * columns) * 4, 4, random),
              pieces);
  }
  return model;
}

FlatUnit unit_of_all() {
  std::vector<std::pair<std::string, Shape>> parameters;
  for (const auto& [fqn, rows, columns] : kTensors) parameters.push_back({fqn, {rows, columns}});
  return make_flat_unit("", DType::float32, std::move(parameters));
}

struct Reads {
  std::uint64_t needed = 0;  // bytes
  std::uint64_t num_runs = 0;
};

/// Reads what `rank` holds under `strategy`, piece by piece, run by run.
Reads read_share(const CheckpointReader& reader, const Strategy& strategy, int rank) {
  const std::vector<FlatUnit> units = {unit_of_all()};
  const FlatUnitIndex index(units);
  Reads reads;
  for (std::size_t t = 0; t < reader.contents().tensors.size(); ++t) {
    const TensorEntry& tensor = reader.contents().tensors[t];
    for (const Shard& shard : shards_of(strategy, tensor.meta.shape, index.find(tensor.meta.fqn))) {
      if (std::ranges::find(shard.ranks, rank) == shard.ranks.end()) continue;
      for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
        const CopyRuns runs(tensor.meta.shape, tensor.pieces[p].region, shard.region);
        runs.for_each_in({0, numel_of(shard.region)}, [&](const CopyRuns::Run& run) {
          test::Bytes bytes(static_cast<std::size_t>(run.numel) * 4);
          reader.read_piece(t, p, {run.source_begin, run.source_begin + run.numel}, bytes);
          reads.needed += bytes.size();
          ++reads.num_runs;
        });
      }
    }
  }
  return reads;
}

class NativeRangeReadTest : public ::testing::TestWithParam<NativeWriteOptions::Compression> {};

// Shows E8.
TEST_P(NativeRangeReadTest, ARankReadsLittleMoreThanItNeeds) {
  test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/checkpoint";
  const MemoryCheckpoint model = model_on_four_ranks();
  test::write_native(model, path, {.compression = GetParam()});
  const std::uint64_t block_nbytes =
      GetParam() == NativeWriteOptions::Compression::none ? kPlainBlockNbytes : kChunkNbytes;

  for (const auto& [name, world_size] : {std::pair{"flat", 3}, {"flat", 8}, {"dim0", 7}}) {
    const Strategy strategy = parse_strategy(name, world_size);
    std::uint64_t needed_by_all = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      SCOPED_TRACE(std::string(name) + " rank " + std::to_string(rank));
      const test::FaultFileSystem fs(FileSystem::posix(), directory.path());
      const auto reader = open_native(fs, path);
      const std::uint64_t read_by_opening = fs.num_bytes_read();
      const Reads reads = read_share(*reader, strategy, rank);
      ASSERT_GT(reads.needed, 0U);
      EXPECT_LE(static_cast<double>(fs.num_bytes_read() - read_by_opening),
                1.05 * static_cast<double>(reads.needed) +
                    2.0 * static_cast<double>(block_nbytes * reads.num_runs));
      needed_by_all += reads.needed;
    }
    std::uint64_t nbytes = 0;
    for (const auto& [fqn, rows, columns] : kTensors) {
      nbytes += static_cast<std::uint64_t>(rows * columns) * 4;
    }
    EXPECT_EQ(needed_by_all, nbytes);
  }
}

INSTANTIATE_TEST_SUITE_P(PlainAndCompressed, NativeRangeReadTest,
                         ::testing::Values(NativeWriteOptions::Compression::none,
                                           NativeWriteOptions::Compression::zstd),
                         [](const auto& test) {
                           return test.param == NativeWriteOptions::Compression::none ? "plain"
                                                                                      : "zstd";
                         });

}  // namespace
}  // namespace tessera::formats
