#include "tessera/reshard/executor.h"

#include <gmock/gmock.h>

#include <chrono>
#include <condition_variable>
#include <latch>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <stop_token>

#include "reshard/resharding.h"
#include "support/error_matchers.h"
#include "tessera/reshard/job_state.h"

namespace tessera::reshard {
namespace {

using formats::Format;
using test::Bytes;
using test::bytes_of;
using test::counting_bytes;
using test::MemoryCheckpoint;
using test::MemoryWriter;
using test::reshard_in_memory;
using ::testing::HasSubstr;

TEST(ExecutorTest, ColumnBlocksComeOutAsRows) {
  MemoryCheckpoint source("src", 2);
  const Bytes whole = counting_bytes(7 * 9 * 4);
  source.add({"w", DType::float32, {7, 9}}, whole,
             {{Box{{0, 0}, {7, 4}}, 0}, {Box{{0, 4}, {7, 5}}, 1}});
  const MemoryCheckpoint moved = reshard_in_memory(source, {.world_size = 3, .strategy = "dim0"});
  EXPECT_EQ(moved.contents().tensors[0].pieces.size(), 3U);
  EXPECT_EQ(whole_tensor(moved, 0), whole);
}

TEST(ExecutorTest, ThreadsDoNotChangeAByte) {
  MemoryCheckpoint source("src", 4);
  source.add({"w", DType::bfloat16, {64, 33}}, counting_bytes(64 * 33 * 2),
             {{FlatRange{0, 1000}, 0}, {FlatRange{1000, 2112}, 1}});
  const MemoryCheckpoint one = reshard_in_memory(source, {.world_size = 8}, 1);
  const MemoryCheckpoint four = reshard_in_memory(source, {.world_size = 8}, 4);
  EXPECT_EQ(whole_tensor(one, 0), counting_bytes(64 * 33 * 2));
  EXPECT_EQ(whole_tensor(four, 0), whole_tensor(one, 0));
}

TEST(ExecutorTest, CastRoundsToNearestEven) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {3}}, bytes_of<float>({1.0F, 1.00390625F, -2.5F}));
  const MemoryCheckpoint moved = reshard_in_memory(source, {.cast = DType::bfloat16});
  EXPECT_EQ(whole_tensor(moved, 0), bytes_of<std::uint16_t>({0x3F80, 0x3F80, 0xC020}));
}

/// A checkpoint with some finite numbers that are too large for float16, in both pieces of `w`.
MemoryCheckpoint with_large_numbers() {
  MemoryCheckpoint source("src", 2);
  std::vector<float> numbers(100, 1.0F);
  source.add({"fits", DType::float32, {100}}, bytes_of<float>(numbers));
  numbers[3] = 70000.0F;
  numbers[60] = -1e9F;
  numbers[99] = 65520.0F;
  numbers[50] = std::numeric_limits<float>::infinity();
  source.add({"w", DType::float32, {100}}, bytes_of<float>(numbers),
             {{Box{{0}, {40}}, 0}, {Box{{40}, {60}}, 1}});
  return source;
}

TEST(ExecutorTest, NumbersThatACastMakesInfiniteAreRefusedWithTheirCount) {
  const MemoryCheckpoint source = with_large_numbers();
  for (const int num_threads : {1, 4}) {
    const Plan plan = plan_reshard(source.contents(), source.path(), {.cast = DType::float16});
    MemoryWriter writer(plan.destination, {});
    try {
      finish_move(plan, source, writer, {.num_threads = num_threads});
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::mismatch);
      EXPECT_EQ(error.where().path, "src");
      EXPECT_EQ(error.where().fqn, "w");
      EXPECT_EQ(error.reason(),
                "cast: expected finite numbers up to 65504.0, the largest of float16, "
                "found 3 larger, up to 1000000000.0");
      EXPECT_EQ(error.remedy().action, Remedy::Action::allow_overflow);
    }
    EXPECT_FALSE(writer.committed());
    EXPECT_TRUE(writer.abandoned());
  }
}

/// A writer whose first call for its first block waits until `abandon` is called, then throws.
class InterruptedAtFirst final : public formats::CheckpointWriter {
 public:
  explicit InterruptedAtFirst(formats::CheckpointContents contents)
      : writer_(std::move(contents), {}), first_(writer_.write_order().front()) {}

  const formats::CheckpointContents& contents() const override { return writer_.contents(); }
  std::span<const PieceId> write_order() const override { return writer_.write_order(); }
  std::int64_t block_numel(PieceId piece) const override { return writer_.block_numel(piece); }
  bool resume_block(PieceId piece, std::int64_t begin, std::span<std::byte>) override {
    if (begin != 0 || piece.tensor_index != first_.tensor_index) return false;
    is_abandoned_.wait();
    throw Error(ErrorKind::interrupted, {}, "writing was abandoned");
  }
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    writer_.write_block(piece, begin, bytes);
  }
  void abandon() noexcept override {
    if (!was_abandoned_.exchange(true)) is_abandoned_.count_down();
  }
  void commit() override { writer_.commit(); }

 private:
  MemoryWriter writer_;
  PieceId first_;
  std::latch is_abandoned_{1};
  std::atomic<bool> was_abandoned_ = false;
};

TEST(ExecutorTest, TheTensorThatIsRefusedDoesNotDependOnTheOrderOfThreads) {
  MemoryCheckpoint source("src");
  source.add({"a", DType::float32, {2}}, bytes_of<float>({1.0F, 70000.0F}));
  source.add({"b", DType::float32, {2}}, bytes_of<float>({80000.0F, 90000.0F}));
  const Plan plan = plan_reshard(source.contents(), source.path(), {.cast = DType::float16});
  InterruptedAtFirst writer(plan.destination);
  EXPECT_THAT([&] { execute(plan, source, writer, {.num_threads = 2}); },
              test::ThrowsError(ErrorKind::mismatch,
                                "a: cast: expected finite numbers up to 65504.0, the largest of "
                                "float16, found 1 larger, up to 70000.0"));
}

TEST(ExecutorTest, NumbersThatAreTooLargeAreCountedByTensorWhereTheyMayPass) {
  const MemoryCheckpoint source = with_large_numbers();
  for (const OnOverflow on_overflow : {OnOverflow::infinity, OnOverflow::saturate}) {
    const Plan plan = plan_reshard(source.contents(), source.path(),
                                   {.cast = DType::float16, .on_overflow = on_overflow});
    MemoryWriter writer(plan.destination, {});
    std::vector<TensorOverflow> overflows;
    execute(plan, source, writer,
            {.num_threads = 2, .overflowed = [&](const auto& each) { overflows.push_back(each); }});
    writer.commit();
    ASSERT_EQ(overflows.size(), 1U);
    EXPECT_EQ(overflows[0].tensor_index, 1U);
    EXPECT_EQ(overflows[0].num_elements, 3);
    EXPECT_EQ(overflows[0].largest_magnitude, 1e9);
    const Bytes moved = whole_tensor(writer.result(), 1);
    const bool is_infinity = on_overflow == OnOverflow::infinity;
    const auto code = [&](std::size_t i) {
      return std::to_integer<int>(moved[2 * i]) | std::to_integer<int>(moved[2 * i + 1]) << 8;
    };
    EXPECT_EQ(code(3), is_infinity ? 0x7C00 : 0x7BFF);
    EXPECT_EQ(code(60), is_infinity ? 0xFC00 : 0xFBFF);
    EXPECT_EQ(code(50), 0x7C00);  // infinite in the source
  }
}

TEST(ExecutorTest, NumbersThatACastMakesZeroAreCountedByTensor) {
  MemoryCheckpoint source("src", 2);
  std::vector<float> numbers(100, 1.0F);
  source.add({"fits", DType::float32, {100}}, bytes_of<float>(numbers));
  for (const std::size_t i : {1U, 50U, 99U}) numbers[i] = 1e-12F;
  numbers[2] = 0.0F;
  source.add({"w", DType::float32, {100}}, bytes_of<float>(numbers),
             {{Box{{0}, {40}}, 0}, {Box{{40}, {60}}, 1}});
  const Plan plan = plan_reshard(source.contents(), source.path(), {.cast = DType::float16});
  MemoryWriter writer(plan.destination, {});
  std::vector<TensorUnderflow> underflows;
  execute(plan, source, writer,
          {.num_threads = 2,
           .overflowed = [](const auto&) { ADD_FAILURE() << "nothing is too large"; },
           .underflowed = [&](const auto& each) { underflows.push_back(each); }});
  ASSERT_EQ(underflows.size(), 1U);
  EXPECT_EQ(underflows[0].tensor_index, 1U);
  EXPECT_EQ(underflows[0].num_elements, 3);
}

TEST(ExecutorTest, ElementsWithReplicasAreCountedOnce) {
  MemoryCheckpoint source("src");
  source.add({"w", DType::float32, {4, 2}}, bytes_of<float>({1, 1e-12F, 7e4F, 2, 8e4F, 0, 3, 1}));
  for (const OnOverflow on_overflow : {OnOverflow::infinity, OnOverflow::refuse}) {
    Plan plan = plan_reshard(source.contents(), source.path(),
                             {.cast = DType::float16, .on_overflow = on_overflow});
    const std::vector<formats::Piece> halves = {{Box{{0, 0}, {2, 2}}, 0},
                                                {Box{{2, 0}, {2, 2}}, 1},
                                                {Box{{0, 0}, {2, 2}}, 2},
                                                {Box{{2, 0}, {2, 2}}, 3}};
    plan.destination.world_size = 4;
    plan.destination.tensors[0].pieces = halves;
    plan.copies[0].source_pieces.edit().assign(halves.size(), {0});
    MemoryWriter writer(plan.destination, {});
    std::vector<TensorOverflow> overflows;
    std::vector<TensorUnderflow> underflows;
    const auto move = [&] {
      execute(plan, source, writer,
              {.num_threads = 2,
               .overflowed = [&](const auto& each) { overflows.push_back(each); },
               .underflowed = [&](const auto& each) { underflows.push_back(each); }});
    };
    if (on_overflow == OnOverflow::refuse) {
      EXPECT_THAT(move, test::ThrowsError(ErrorKind::mismatch, "found 2 larger, up to 80000.0"));
      continue;
    }
    move();
    ASSERT_EQ(overflows.size(), 1U);
    EXPECT_EQ(overflows[0].num_elements, 2);
    ASSERT_EQ(underflows.size(), 1U);
    EXPECT_EQ(underflows[0].num_elements, 1);
  }
}

// Shows D9.
TEST(ExecutorTest, MergedStateIsTheMeanWeightedByColumnWidths) {
  MemoryCheckpoint source("src", 2);
  source.add({"model.embedding_bags.t0.weight", DType::float32, {2, 4}}, counting_bytes(32),
             {{Box{{0, 0}, {2, 3}}, 0}, {Box{{0, 3}, {2, 1}}, 1}});
  source.add({"optim.state.embedding_bags.t0.weight.t0.momentum1", DType::float32, {4}},
             bytes_of<float>({1.0F, 2.0F, 5.0F, 10.0F}), {{Box{{0}, {2}}, 0}, {Box{{2}, {2}}, 1}});
  const auto plan = TablePlan::from_json(
      R"({"schema":1,"world_size":2,"tables":{"t0":{"sharding":"row_wise","ranks":[0,1]}}})", "p");
  const MemoryCheckpoint moved =
      reshard_in_memory(source, {.table_plan = plan, .lossy = Relaxation::allow});
  EXPECT_EQ(whole_tensor(moved, 1), bytes_of<float>({2.0F, 4.0F}));  // (3 a + 1 b) / 4
}

// Shows D9.
TEST(ExecutorTest, EachColumnShardGetsTheRowsOfOneAccumulator) {
  MemoryCheckpoint source("src", 2);
  source.add({"model.embedding_bags.t0.weight", DType::float32, {5, 4}}, counting_bytes(80));
  source.add({"optim.state.embedding_bags.t0.weight.row_sum", DType::float32, {5}},
             bytes_of<float>({1.0F, 2.0F, 3.0F, 4.0F, 5.0F}),
             {{Box{{0}, {2}}, 0}, {Box{{2}, {3}}, 1}});
  const auto grid = TablePlan::from_json(R"({"schema":1,"world_size":4,"tables":{"t0":
      {"sharding":"grid","ranks":[3,2,1,0],"column_shards":2}}})",
                                         "p");
  const MemoryCheckpoint moved =
      reshard_in_memory(source, {.table_plan = grid, .optimizer_names = OptimizerNames::torchrec});
  EXPECT_EQ(moved.contents().tensors[1].meta.fqn,
            "optim.state.embedding_bags.t0.weight.t0.momentum1");
  EXPECT_EQ(moved.contents().tensors[1].pieces.size(), 4U);
  EXPECT_EQ(whole_tensor(moved, 1), bytes_of<float>({1.0F, 2.0F, 3.0F, 4.0F, 5.0F,  //
                                                     1.0F, 2.0F, 3.0F, 4.0F, 5.0F}));
}

// Shows D9.
TEST(ExecutorTest, OtherColumnShardsGetTheMergedRowsEach) {
  MemoryCheckpoint source("src", 2);
  source.add({"model.embedding_bags.t0.weight", DType::float32, {2, 6}}, counting_bytes(48),
             {{Box{{0, 0}, {2, 2}}, 0}, {Box{{0, 2}, {2, 4}}, 1}});
  source.add({"optim.state.embedding_bags.t0.weight.t0.momentum1", DType::float32, {4}},
             bytes_of<float>({1.0F, 2.0F, 4.0F, 8.0F}), {{Box{{0}, {2}}, 0}, {Box{{2}, {2}}, 1}});
  const auto columns = TablePlan::from_json(
      R"({"schema":1,"world_size":3,"tables":{"t0":{"sharding":"column_wise","ranks":[0,1,2]}}})",
      "p");
  const MemoryCheckpoint moved =
      reshard_in_memory(source, {.table_plan = columns, .lossy = Relaxation::allow});
  EXPECT_EQ(whole_tensor(moved, 1),  // (2 a + 4 b) / 6
            bytes_of<float>({3.0F, 6.0F, 3.0F, 6.0F, 3.0F, 6.0F}));
}

TEST(ExecutorTest, DamageInTheSourceAbandonsTheWriter) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {1000}}, counting_bytes(4000));
  source.fail_reads_of("w", 0);
  const Plan plan = plan_reshard(source.contents(), source.path(), {});
  MemoryWriter writer(plan.destination, {});
  EXPECT_THROW(execute(plan, source, writer, {.num_threads = 2}), Error);
  EXPECT_TRUE(writer.abandoned());
  EXPECT_FALSE(writer.committed());
}

TEST(ExecutorTest, TooLittleMemoryIsNamedWithBothNumbers) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {1000}}, counting_bytes(4000));
  const Plan plan = plan_reshard(source.contents(), source.path(), {});
  MemoryWriter writer(plan.destination, {});
  try {
    execute(plan, source, writer, {.memory_nbytes = 1000});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("1000 bytes"));
  }
}

TEST(ExecutorTest, StopRequestInterrupts) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {1000}}, counting_bytes(4000));
  const Plan plan = plan_reshard(source.contents(), source.path(), {});
  MemoryWriter writer(plan.destination, {});
  std::stop_source stop;
  const auto progress = [&](std::uint64_t) { stop.request_stop(); };
  try {
    execute(plan, source, writer,
            {.num_threads = 1, .stop = stop.get_token(), .progress = progress});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::interrupted);
  }
  EXPECT_TRUE(writer.abandoned());
}

/// A writer whose first block requests a stop, and then waits as for an earlier block: until
/// `abandon` is called. Other blocks wait for the request.
class StoppedInFirst final : public formats::CheckpointWriter {
 public:
  StoppedInFirst(formats::CheckpointContents contents, std::stop_source& stop)
      : writer_(std::move(contents), {}), stop_(stop) {}

  const formats::CheckpointContents& contents() const override { return writer_.contents(); }
  std::span<const PieceId> write_order() const override { return writer_.write_order(); }
  std::int64_t block_numel(PieceId piece) const override { return writer_.block_numel(piece); }
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    writer_.write_block(piece, begin, bytes);
    if (piece.tensor_index != 0) return is_stopped_.wait();
    stop_.request_stop();
    is_stopped_.count_down();
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10), [&] { return is_abandoned_; });
    was_woken_ = is_abandoned_;
  }
  void abandon() noexcept override {
    const std::scoped_lock lock(mutex_);
    is_abandoned_ = true;
    changed_.notify_all();
  }
  void commit() override { writer_.commit(); }

  bool was_woken() const { return was_woken_; }

 private:
  MemoryWriter writer_;
  std::stop_source& stop_;
  std::latch is_stopped_{1};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_abandoned_ = false;
  bool was_woken_ = false;
};

/// A stop request may come after a thread has taken a block, but before it writes the block. Then
/// no thread writes it. Threads that wait for this block must wake.
TEST(ExecutorTest, StopRequestWakesThreadsThatWaitInTheWriter) {
  MemoryCheckpoint source;
  for (const char* name : {"a", "b", "c"}) {
    source.add({name, DType::float32, {1}}, counting_bytes(4));
  }
  const Plan plan = plan_reshard(source.contents(), source.path(), {});
  std::stop_source stop;
  StoppedInFirst writer(plan.destination, stop);
  EXPECT_THROW(execute(plan, source, writer, {.num_threads = 2, .stop = stop.get_token()}), Error);
  EXPECT_TRUE(writer.was_woken());
}

// Shows E14.
TEST(ExecutorTest, EmptyAndZeroDimensionalTensorsAreOrdinary) {
  MemoryCheckpoint source;
  source.add({"empty", DType::float32, {0, 4}}, {});
  source.add({"scalar", DType::int64, {}}, bytes_of<std::int64_t>({42}));
  const MemoryCheckpoint moved = reshard_in_memory(source, {.world_size = 5});
  EXPECT_EQ(moved.contents().tensors.size(), 2U);
  EXPECT_EQ(whole_tensor(moved, 1), bytes_of<std::int64_t>({42}));
}

/// Records the first address into which elements of each tensor are read.
class NotesAddresses final : public formats::TensorSource {
 public:
  explicit NotesAddresses(const formats::TensorSource& source) : source_(source) {}

  const formats::CheckpointContents& contents() const override { return source_.contents(); }
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    addresses_.emplace(tensor_index, out.data());
    source_.read_piece(tensor_index, piece_index, range, out);
  }
  const std::byte* address(std::size_t tensor_index) const { return addresses_.at(tensor_index); }

 private:
  const formats::TensorSource& source_;
  mutable std::map<std::size_t, const std::byte*> addresses_;
};

TEST(ExecutorTest, ReadsStraightIntoMemoryUnlessNumbersAreCast) {
  MemoryCheckpoint source("src");
  source.add({"number", DType::float32, {3}}, bytes_of<float>({1.0F, -2.0F, 0.5F}));
  source.add({"scalar", DType::int64, {}}, bytes_of<std::int64_t>({42}));
  for (const std::optional<DType> cast : {std::optional<DType>(), std::optional(DType::float64)}) {
    const Plan plan = plan_reshard(source.contents(), source.path(), {.cast = cast});
    Bytes number(1 + 3 * (cast ? 8 : 4));  // the elements begin at an odd address
    Bytes scalar(8);
    const NotesAddresses reader(source);
    const auto writer = memory_writer(plan.destination, {{number.data() + 1}, {scalar.data()}});
    execute(plan, reader, *writer, {.num_threads = 1});
    EXPECT_EQ(Bytes(number.begin() + 1, number.end()),
              cast ? bytes_of<double>({1.0, -2.0, 0.5}) : bytes_of<float>({1.0F, -2.0F, 0.5F}));
    EXPECT_EQ(scalar, bytes_of<std::int64_t>({42}));
    EXPECT_EQ(reader.address(0) == number.data() + 1, !cast);
    EXPECT_EQ(reader.address(1), scalar.data());
  }
}

}  // namespace
}  // namespace tessera::reshard
