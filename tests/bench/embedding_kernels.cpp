// Times the kernels of embedding tables without torch. Prints a JSON object per line: first how
// fast this machine reads and updates rows at random, then each kernel, with its speed as a share
// of that.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "embedding_kernels/fused_update.h"
#include "embedding_kernels/huge_pages.h"
#include "embedding_kernels/pooled.h"
#include "embedding_kernels/touched_rows.h"

namespace {

using namespace tessera;
using namespace tessera::embedding;

constexpr std::int64_t kRows = 100'000;
constexpr std::int64_t kBatch = 4096;
constexpr std::int64_t kPooling = 10;               // ids per bag
constexpr std::int64_t kTableNbytes = 512'000'000;  // of all tables of a case
constexpr int kRounds = 9;

double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median_seconds(const std::function<void()>& body) {
  body();
  std::vector<double> seconds;
  for (int round = 0; round < kRounds; ++round) seconds.push_back(seconds_of(body));
  std::ranges::nth_element(seconds, seconds.begin() + kRounds / 2);
  return seconds[kRounds / 2];
}

bool with_huge_pages = false;

/// Memory that has been written to, so that no page fault happens while time is measured.
struct Memory {
  std::unique_ptr<std::byte[]> bytes;
  explicit Memory(std::int64_t nbytes) : bytes(new std::byte[static_cast<std::size_t>(nbytes)]) {
    const std::span<std::byte> all(bytes.get(), static_cast<std::size_t>(nbytes));
    if (with_huge_pages) prefer_huge_pages(all);
    std::ranges::fill(all, std::byte{0});
  }
};

enum class Ids { uniform, zipf };

/// Draws ids. Ids::zipf: the k-th most frequent id has the weight 1 / k^1.05, and is a random row.
class IdSource {
 public:
  explicit IdSource(Ids ids) : ids_(ids) {
    double sum = 0;
    for (std::int64_t k = 1; k <= kRows; ++k) {
      sum += std::pow(static_cast<double>(k), -1.05);
      cumulative_.push_back(sum);
    }
  }

  std::int64_t next() {
    if (ids_ == Ids::uniform)
      return std::uniform_int_distribution<std::int64_t>(0, kRows - 1)(engine_);
    const double drawn = std::uniform_real_distribution<double>(0, cumulative_.back())(engine_);
    const auto rank = std::ranges::lower_bound(cumulative_, drawn) - cumulative_.begin();
    constexpr std::int64_t kStep = 38'153;  // no common factor with kRows
    return rank * kStep % kRows;
  }

 private:
  Ids ids_;
  std::mt19937_64 engine_{1};
  std::vector<double> cumulative_{};
};

/// Runs `body(thread)` on `num_threads` threads.
void on_threads(int num_threads, const std::function<void(int)>& body) {
  std::vector<std::jthread> threads;
  for (int thread = 1; thread < num_threads; ++thread) threads.emplace_back(body, thread);
  body(0);
}

/// Bytes per second of reading rows at random, and of reading and writing them.
struct Bandwidth {
  double read = 0;
  double update = 0;
};

Bandwidth random_row_bandwidth(std::int64_t row_nbytes, int num_threads) {
  const std::int64_t num_rows = kTableNbytes / row_nbytes;
  const auto row_numel = static_cast<std::size_t>(row_nbytes) / sizeof(float);
  const Memory memory(num_rows * row_nbytes);
  auto* data = reinterpret_cast<float*>(memory.bytes.get());
  constexpr std::size_t kVisits = 400'000;
  constexpr std::size_t kAhead = 16;
  std::vector<float*> rows(kVisits + kAhead);
  std::mt19937_64 engine(2);
  for (float*& row : rows) {
    row = data + static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(num_rows)) *
                     static_cast<std::int64_t>(row_numel);
  }
  const auto visit = [&](int thread, const auto& body) {
    const std::size_t begin =
        kVisits * static_cast<std::size_t>(thread) / static_cast<std::size_t>(num_threads);
    const std::size_t end =
        kVisits * static_cast<std::size_t>(thread + 1) / static_cast<std::size_t>(num_threads);
    std::vector<float> sums(row_numel);
    for (std::size_t i = begin; i < end; ++i) {
      for (std::size_t k = 0; k < row_numel; k += 16) __builtin_prefetch(rows[i + kAhead] + k, 1);
      body(rows[i], sums.data());
    }
    static volatile float kept;
    kept = sums[0];
  };
  const auto seconds = [&](const auto& body) {
    return median_seconds(
        [&] { on_threads(num_threads, [&](int thread) { visit(thread, body); }); });
  };
  const double nbytes = static_cast<double>(row_nbytes) * kVisits;
  return {.read = nbytes / seconds([&](const float* row, float* sums) {
                    for (std::size_t k = 0; k < row_numel; ++k) sums[k] += row[k];
                  }),
          .update = 2 * nbytes / seconds([&](float* row, const float*) {
                      for (std::size_t k = 0; k < row_numel; ++k) row[k] += 1;
                    })};
}

struct Case {
  DType dtype;
  std::int64_t dim;
  Ids ids;
  int num_threads;

  std::int64_t row_nbytes() const { return dim * static_cast<std::int64_t>(itemsize(dtype)); }
  std::int64_t num_tables() const {
    return std::min<std::int64_t>(20, kTableNbytes / (kRows * dim * 4));
  }
};

class Step {
 public:
  Step(const Case& measured, const Bandwidth& bandwidth)
      : case_(measured),
        bandwidth_(bandwidth),
        columns_(measured.num_tables() * measured.dim),
        out_(kBatch * columns_ * 4),
        gradient_(kBatch * columns_ * 4) {
    IdSource source(measured.ids);
    offsets_.push_back(0);
    for (int table = 0; table < measured.num_tables(); ++table) {
      memories_.emplace_back(kRows * measured.row_nbytes());
      tables_.push_back({.weights = memories_.back().bytes.get(),
                         .dtype = measured.dtype,
                         .rows = kRows,
                         .dim = measured.dim});
      table_of_feature_.push_back(table);
      column_of_feature_.push_back(table * measured.dim);
      for (std::int64_t sample = 0; sample < kBatch; ++sample) {
        for (std::int64_t i = 0; i < kPooling; ++i) ids_.push_back(source.next());
        offsets_.push_back(static_cast<std::int64_t>(ids_.size()));
      }
    }
    std::ranges::fill_n(gradient(), kBatch * columns_, 0.01F);
  }

  void measure_forward() {
    forward_ = median_seconds([&] {
      pooled_sums(tables_, bags(), reinterpret_cast<float*>(out_.bytes.get()), columns_,
                  case_.num_threads);
    });
    const double nbytes =
        static_cast<double>(ids_.size()) * static_cast<double>(case_.row_nbytes());
    print("forward", forward_, nbytes / bandwidth_.read);
    ideal_forward_ = nbytes / bandwidth_.read;
    sort_ = median_seconds([&] { touched_.assign(tables_, bags(), case_.num_threads); });
    print("touched_rows", sort_, 0);
  }

  void measure_update(std::string_view name, const FusedOptimizer& optimizer) {
    std::vector<Memory> states;
    std::vector<TableUpdate> updates;
    double num_touched = 0;
    for (int table = 0; table < static_cast<int>(tables_.size()); ++table) {
      updates.push_back({.table = table,
                         .view = tables_[static_cast<std::size_t>(table)],
                         .optimizer = optimizer,
                         .state = state(optimizer, states)});
      num_touched += static_cast<double>(touched_[table].num_rows());
    }
    const double seconds =
        sort_ + median_seconds([&] {
          fused_update(updates, touched_, {.data = gradient(), .stride = columns_},
                       case_.num_threads);
        });
    const double ideal = 2 * num_touched * touched_nbytes(optimizer) / bandwidth_.update;
    print("backward_" + std::string(name), seconds, ideal);
    print("step_" + std::string(name), forward_ + seconds, ideal_forward_ + ideal);
  }

 private:
  Bags bags() const {
    return {.table_of_feature = table_of_feature_,
            .column_of_feature = column_of_feature_,
            .batch = kBatch,
            .ids = ids_,
            .offsets = offsets_,
            .weights = {}};
  }
  float* gradient() { return reinterpret_cast<float*>(gradient_.bytes.get()); }

  /// Returns the bytes of a row and of its pointwise optimizer state.
  double touched_nbytes(const FusedOptimizer& optimizer) const {
    const std::int64_t num_pointwise = std::holds_alternative<Adam>(optimizer) ? 2
                                       : std::holds_alternative<Adagrad>(optimizer) ||
                                               std::holds_alternative<RowWiseAdam>(optimizer)
                                           ? 1
                                           : 0;
    return static_cast<double>(case_.row_nbytes() + num_pointwise * case_.dim * 4);
  }

  OptimizerState state(const FusedOptimizer& optimizer, std::vector<Memory>& memories) const {
    const auto floats = [&](std::int64_t numel) {
      memories.emplace_back(numel * 4);
      return reinterpret_cast<float*>(memories.back().bytes.get());
    };
    OptimizerState made{.step = 1};
    const std::int64_t numel = kRows * case_.dim;
    if (std::holds_alternative<Adagrad>(optimizer)) made.sum = floats(numel);
    if (std::holds_alternative<RowWiseAdagrad>(optimizer)) made.row_sum = floats(kRows);
    if (std::holds_alternative<Adam>(optimizer)) {
      made.exp_avg = floats(numel);
      made.exp_avg_sq = floats(numel);
    }
    if (std::holds_alternative<RowWiseAdam>(optimizer)) {
      made.exp_avg = floats(numel);
      made.row_exp_avg_sq = floats(kRows);
    }
    return made;
  }

  void print(const std::string& name, double seconds, double ideal_seconds) const {
    std::printf(
        "{\"kernel\": \"%s\", \"dtype\": \"%s\", \"tables\": %d, \"dim\": %d, \"ids\": \"%s\", "
        "\"threads\": %d, \"ms\": %.2f, \"samples_per_second\": %.0f, \"of_bandwidth\": %.2f}\n",
        name.c_str(), std::string(dtype_name(case_.dtype)).c_str(),
        static_cast<int>(case_.num_tables()), static_cast<int>(case_.dim),
        case_.ids == Ids::uniform ? "uniform" : "zipf", case_.num_threads, seconds * 1e3,
        kBatch / seconds, ideal_seconds / seconds);
    std::fflush(stdout);
  }

  Case case_;
  Bandwidth bandwidth_;
  std::int64_t columns_;
  Memory out_;
  Memory gradient_;
  std::vector<Memory> memories_{};
  std::vector<TableView> tables_{};
  std::vector<int> table_of_feature_{};
  std::vector<std::int64_t> column_of_feature_{};
  std::vector<std::int64_t> ids_{};
  std::vector<std::int64_t> offsets_{};
  TouchedRows touched_{};
  double forward_ = 0;
  double ideal_forward_ = 0;
  double sort_ = 0;
};

Bandwidth measure_bandwidth(std::int64_t row_nbytes, int num_threads) {
  const Bandwidth bandwidth = random_row_bandwidth(row_nbytes, num_threads);
  std::printf(
      "{\"random_rows_of_bytes\": %d, \"threads\": %d, \"read_GB_per_second\": %.1f, "
      "\"update_GB_per_second\": %.1f}\n",
      static_cast<int>(row_nbytes), num_threads, bandwidth.read / 1e9, bandwidth.update / 1e9);
  return bandwidth;
}

void measure(const Case& measured) {
  const Bandwidth bandwidth = measure_bandwidth(measured.row_nbytes(), measured.num_threads);
  Step step(measured, bandwidth);
  step.measure_forward();
  step.measure_update("sgd", Sgd{});
  step.measure_update("row_wise_adagrad", RowWiseAdagrad{});
  step.measure_update("adagrad", Adagrad{});
  step.measure_update("row_wise_adam", RowWiseAdam{});
  step.measure_update("adam", Adam{});
}

}  // namespace

/// Measures all cases; with `--quick` only float32 with 64 columns. `--huge-pages` uses such pages.
/// `--bandwidth NBYTES THREADS`, as the last argument: only measures how fast rows of NBYTES bytes
/// are read and updated at random.
int main(int argc, char** argv) {
  bool is_quick = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--quick") is_quick = true;
    if (argument == "--huge-pages") with_huge_pages = true;
    if (argument == "--bandwidth" && i + 2 < argc) {
      measure_bandwidth(std::stoll(argv[i + 1]), std::stoi(argv[i + 2]));
      return 0;
    }
  }
  for (const int num_threads : {1, 2}) {
    for (const Ids ids : {Ids::uniform, Ids::zipf}) {
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        for (const std::int64_t dim : {16, 64, 256}) {
          const bool is_chosen = dtype == DType::float32 && dim == 64;
          if (!is_quick || is_chosen) measure({dtype, dim, ids, num_threads});
        }
      }
    }
  }
}
