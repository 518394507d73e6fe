// Simulates one move by many workers: plans it, divides it as `ckpt-reshard --part I/N` does, and
// runs workers with a source and a destination that count reads and writes and hold no bytes:
//   many_workers TENSORS ROWS COLUMNS SOURCE_RANKS RANKS WORKERS SAMPLED
// Tensors are float32 [ROWS, COLUMNS], cut by rows. Source and destination have one file for each
// rank, as DCP has. Runs every (WORKERS / SAMPLED)th worker. Prints JSON.

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "reshard/execute_blocks.h"
#include "reshard/work_shares.h"
#include "tessera/formats/format_writer.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"

namespace {

using namespace tessera;
using formats::CheckpointContents;

constexpr std::int64_t kBlockNbytes = 8 << 20;  // of DCP's writer

struct Arguments {
  std::int64_t tensors = 0, rows = 0, columns = 0;
  int source_ranks = 0, ranks = 0, workers = 0, sampled = 0;
};

CheckpointContents contents_of(const Arguments& arguments) {
  CheckpointContents contents;
  contents.world_size = arguments.source_ranks;
  const std::int64_t rows_of_rank =
      (arguments.rows + arguments.source_ranks - 1) / arguments.source_ranks;
  for (std::int64_t t = 0; t < arguments.tensors; ++t) {
    char name[32];
    std::snprintf(name, sizeof name, "layers.%06d.weight", static_cast<int>(t));
    formats::TensorEntry entry{.meta = {name, DType::float32, {arguments.rows, arguments.columns}}};
    for (int rank = 0; rank < arguments.source_ranks; ++rank) {
      const std::int64_t begin = std::min(rank * rows_of_rank, arguments.rows);
      const std::int64_t end = std::min(begin + rows_of_rank, arguments.rows);
      if (begin == end) break;
      entry.pieces.push_back({Box{{begin, 0}, {end - begin, arguments.columns}}, rank});
    }
    contents.tensors.push_back(std::move(entry));
  }
  return contents;
}

/// Counts what is read. Does not fill the buffers.
class CountingSource final : public formats::TensorSource {
 public:
  explicit CountingSource(const CheckpointContents& contents) : contents_(contents) {}
  const CheckpointContents& contents() const override { return contents_; }
  void read_piece(std::size_t tensor, std::size_t piece, FlatRange,
                  std::span<std::byte> out) const override {
    const std::scoped_lock lock(mutex_);
    nbytes_ += out.size();
    ++num_reads_;
    files_.insert(contents_.tensors[tensor].pieces[piece].rank);
  }

  std::uint64_t nbytes() const { return nbytes_; }
  std::uint64_t num_reads() const { return num_reads_; }
  std::size_t num_files() const { return files_.size(); }

 private:
  const CheckpointContents& contents_;
  mutable std::mutex mutex_;
  mutable std::uint64_t nbytes_ = 0;
  mutable std::uint64_t num_reads_ = 0;
  mutable std::set<int> files_;
};

/// Counts what is written.
class CountingWriter final : public formats::ShareWriter {
 public:
  explicit CountingWriter(const CheckpointContents& contents) : contents_(contents) {
    for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
      for (std::size_t p = 0; p < contents.tensors[t].pieces.size(); ++p) order_.push_back({t, p});
    }
    std::ranges::stable_sort(order_, {}, [&](PieceId id) { return file_of(id); });
  }
  const CheckpointContents& contents() const override { return contents_; }
  std::span<const PieceId> write_order() const override { return order_; }
  std::int64_t block_numel(PieceId) const override { return kBlockNbytes / 4; }
  void write_block(PieceId piece, std::int64_t, std::span<const std::byte> bytes) override {
    const std::scoped_lock lock(mutex_);
    nbytes_ += bytes.size();
    files_.insert(file_of(piece));
  }
  void abandon() noexcept override {}
  void commit() override {}
  Unit unit() const override { return Unit::block; }
  void adopt_block(PieceId, std::int64_t) override {}
  void commit_share() override {}
  std::size_t file_of(PieceId id) const override {
    return static_cast<std::size_t>(contents_.tensors[id.tensor_index].pieces[id.piece_index].rank);
  }
  std::uint64_t nbytes() const { return nbytes_; }
  std::size_t num_files() const { return files_.size(); }

 private:
  const CheckpointContents& contents_;
  std::vector<PieceId> order_;
  std::mutex mutex_;
  std::uint64_t nbytes_ = 0;
  std::set<std::size_t> files_;
};

/// What one worker does.
struct Work {
  std::uint64_t nbytes_written = 0, nbytes_read = 0, num_reads = 0;
  std::size_t num_source_files = 0, num_files = 0;
};

Work run_worker(const reshard::Plan& plan, const CheckpointContents& source_contents,
                const std::vector<reshard::BlockRange>& blocks) {
  const CountingSource source(source_contents);
  CountingWriter writer(plan.destination);
  reshard::execute_blocks(plan, source, writer, {.num_threads = 1}, blocks);
  return {writer.nbytes(), source.nbytes(), source.num_reads(), source.num_files(),
          writer.num_files()};
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

template <class Member>
void print_largest(const char* name, const std::vector<Work>& workers, Member member) {
  const Work& largest = std::ranges::max(workers, {}, member);
  std::cout << ", \"" << name << "\": " << largest.*member;
}

void simulate(const Arguments& arguments) {
  const CheckpointContents contents = contents_of(arguments);
  const auto begin = std::chrono::steady_clock::now();
  const reshard::Plan plan = reshard::plan_reshard(
      contents, "source", {.world_size = arguments.ranks, .strategy = "dim0"});
  const double plan_seconds = seconds_since(begin);
  const auto divide_begin = std::chrono::steady_clock::now();
  const auto shares = reshard::divide_blocks(CountingWriter(plan.destination), arguments.workers);
  const double divide_seconds = seconds_since(divide_begin);
  std::vector<Work> workers;
  double most_read = 0.0;  // times what a worker writes
  for (int i = 0; i < arguments.workers; i += arguments.workers / arguments.sampled) {
    workers.push_back(run_worker(plan, contents, shares[static_cast<std::size_t>(i)].ranges));
    most_read = std::max(most_read, static_cast<double>(workers.back().nbytes_read) /
                                        static_cast<double>(workers.back().nbytes_written));
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::cout << "{\"nbytes\": " << plan.nbytes_to_write << ", \"plan_seconds\": " << plan_seconds
            << ", \"divide_seconds\": " << divide_seconds
            << ", \"peak_nbytes\": " << std::uint64_t(usage.ru_maxrss) * 1024
            << ", \"workers_run\": " << workers.size()
            << ", \"most_read_per_written\": " << most_read;
  print_largest("nbytes_written", workers, &Work::nbytes_written);
  print_largest("nbytes_read", workers, &Work::nbytes_read);
  print_largest("reads", workers, &Work::num_reads);
  print_largest("source_files", workers, &Work::num_source_files);
  print_largest("files", workers, &Work::num_files);
  std::cout << "}\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    std::cerr << "usage: many_workers TENSORS ROWS COLUMNS SOURCE_RANKS RANKS WORKERS SAMPLED\n";
    return 2;
  }
  simulate({.tensors = std::stol(argv[1]),
            .rows = std::stol(argv[2]),
            .columns = std::stol(argv[3]),
            .source_ranks = std::stoi(argv[4]),
            .ranks = std::stoi(argv[5]),
            .workers = std::stoi(argv[6]),
            .sampled = std::stoi(argv[7])});
}
