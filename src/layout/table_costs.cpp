#include "layout/table_costs.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/checked_math.h"
#include "base/size_text.h"
#include "layout/cut.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr double kIdNbytes = 8;
constexpr double kLengthNbytes = 8;
constexpr double kIdWeightNbytes = 4;
constexpr double kPooledItemsize = 4;
constexpr double kRowSumNbytes = 4;
constexpr double kCacheLineNbytes = 64;
constexpr int kMostColumnShardsTriedSingly = 8;

double in_cache_lines(double nbytes) {
  return std::ceil(nbytes / kCacheLineNbytes) * kCacheLineNbytes;
}

/// Returns the bytes of a dense gradient for each element. A gradient is summed in float32, then
/// converted to the table's dtype; for a moment both are there.
double gradient_itemsize(const TableSize& table) {
  constexpr std::size_t kSumItemsize = 4;
  const std::size_t item = itemsize(table.dtype);
  return static_cast<double>(item < kSumItemsize ? item + kSumItemsize : item);
}

double id_nbytes(const TableSize& table) {
  return kIdNbytes + (table.is_weighted ? kIdWeightNbytes : 0);
}

/// Computes the costs of one table's shards; see [Note: What a shard costs].
class CostModel {
 public:
  CostModel(const TableSize& table, TableKernel kernel, const PlannerOptions& options)
      : table_(table),
        kernel_(kernel),
        bandwidths_(options.bandwidths),
        world_size_(options.world_size),
        ranks_per_host_(num_ranks_per_host(options)),
        bags_of_a_rank_(static_cast<double>(options.batch_size) * table.num_features),
        ids_of_a_rank_(bags_of_a_rank_ * table.pooling_factor) {}

  ShardCost replica() const {
    const auto rows = static_cast<double>(table_.rows);
    const auto columns = static_cast<double>(table_.columns);
    ShardCost cost;
    cost.nbytes = to_nbytes(kept_nbytes(rows, columns, TableKernel::dense));
    cost.seconds = memory_seconds(rows, columns, ids_of_a_rank_, TableKernel::dense) +
                   2 * (world_size_ - 1.0) / world_size_ * rows * columns * item() / slowest_link();
    return cost;
  }

  /// Returns the cost of one shard. `row_sums_link`: bytes per second between the ranks that hold
  /// the column shards of a row.
  ShardCost shard(std::int64_t num_rows, std::int64_t num_columns, int num_column_shards,
                  double row_sums_link) const {
    if (num_rows == 0 || num_columns == 0) return {};
    const auto rows = static_cast<double>(num_rows);
    const auto columns = static_cast<double>(num_columns);
    const double share = rows / static_cast<double>(table_.rows);
    const double ids_from_a_rank = ids_of_a_rank_ * share;
    const double ids = ids_from_a_rank * world_size_;
    const double inputs = ids_from_a_rank * id_nbytes(table_) + bags_of_a_rank_ * kLengthNbytes;
    const double outputs = 2 * bags_of_a_rank_ * columns * kPooledItemsize;
    ShardCost cost;
    cost.nbytes = to_nbytes(kept_nbytes(rows, columns, kernel_) + world_size_ * (inputs + outputs));
    cost.seconds = memory_seconds(rows, columns, ids, kernel_) + seconds_to_peers(inputs + outputs);
    if (table_.state_nbytes_per_row > 0) {
      cost.seconds += kRowSumNbytes * ids * (num_column_shards - 1) / row_sums_link;
    }
    return cost;
  }

  double slowest_link() const {
    return world_size_ > ranks_per_host_ ? bandwidths_.between_hosts : bandwidths_.within_host;
  }

 private:
  static std::uint64_t to_nbytes(double nbytes) {
    return static_cast<std::uint64_t>(std::ceil(nbytes));
  }
  double item() const { return static_cast<double>(itemsize(table_.dtype)); }
  double state_of_row(double columns) const {
    return columns * static_cast<double>(table_.state_nbytes_per_element);
  }
  double state_of_row() const { return static_cast<double>(table_.state_nbytes_per_row); }

  double kept_nbytes(double rows, double columns, TableKernel kernel) const {
    const double gradient = kernel == TableKernel::dense ? columns * gradient_itemsize(table_) : 0;
    return rows * (columns * item() + gradient + state_of_row(columns) + state_of_row());
  }

  double memory_seconds(double rows, double columns, double ids, TableKernel kernel) const {
    double nbytes = ids * 3 * in_cache_lines(columns * item());
    if (kernel == TableKernel::fused) {
      nbytes += ids * 2 * (in_cache_lines(state_of_row(columns)) + in_cache_lines(state_of_row()));
    } else {
      nbytes += rows * (3 * columns * item() + 2 * state_of_row(columns) + 2 * state_of_row());
    }
    return nbytes / bandwidths_.random_rows;
  }

  double seconds_to_peers(double nbytes_to_each) const {
    return nbytes_to_each * ((ranks_per_host_ - 1.0) / bandwidths_.within_host +
                             (world_size_ - ranks_per_host_) / bandwidths_.between_hosts);
  }

  const TableSize& table_;
  const TableKernel kernel_;
  const PlannerBandwidths& bandwidths_;
  const double world_size_;
  const double ranks_per_host_;
  const double bags_of_a_rank_;
  const double ids_of_a_rank_;
};

class CandidateList {
 public:
  CandidateList(const TableSize& table, const TableConstraint& constraint,
                const AllowedRanks& allowed, const PlannerOptions& options)
      : table_(table),
        constraint_(constraint),
        options_(options),
        model_(table, constraint.kernel, options),
        num_ranks_(static_cast<int>(allowed.ranks.size())),
        num_hosts_(static_cast<int>(allowed.hosts.size())),
        ranks_per_host_(num_ranks_per_host(options)) {}

  std::vector<ShardingCandidate> all() {
    using enum TableSharding;
    const bool has_replicas = num_ranks_ > 1 || is_asked_for(data_parallel);
    if (may_be(data_parallel) && has_replicas && num_ranks_ == options_.world_size) add_replicas();
    if (may_be(table_wise)) add(table_wise, 1, 1, 0);
    if (may_be(column_wise)) add_by_columns(column_wise, num_ranks_);
    if (may_be(row_wise) && (num_ranks_ > 1 || is_asked_for(row_wise))) {
      add(row_wise, 1, num_ranks_, 0);
    }
    if (may_be_on_hosts(table_row_wise)) add(table_row_wise, 1, ranks_per_host_, 1);
    if (may_be_on_hosts(table_column_wise)) add_by_columns(table_column_wise, ranks_per_host_);
    if (may_be_on_hosts(grid)) add_by_columns(grid, num_hosts_);
    if (candidates_.empty()) refuse();
    std::stable_sort(candidates_.begin(), candidates_.end(), [](const auto& a, const auto& b) {
      return a.total_seconds < b.total_seconds;
    });
    return std::move(candidates_);
  }

 private:
  bool is_asked_for(TableSharding sharding) const {
    return std::ranges::find(constraint_.shardings, sharding) != constraint_.shardings.end();
  }
  bool may_be(TableSharding sharding) const {
    return constraint_.shardings.empty() || is_asked_for(sharding);
  }
  bool may_be_on_hosts(TableSharding sharding) const {
    const bool is_of_use = ranks_per_host_ > 1 && ranks_per_host_ < options_.world_size;
    return num_hosts_ > 0 && (is_of_use ? may_be(sharding) : is_asked_for(sharding));
  }

  void add_replicas() {
    ShardingCandidate candidate{.sharding = TableSharding::data_parallel};
    candidate.shards.assign(static_cast<std::size_t>(options_.world_size), model_.replica());
    push(std::move(candidate));
  }

  void add_by_columns(TableSharding sharding, int most_shards) {
    const auto is_wide_enough = [&](int num_shards) {
      const FlatRange narrowest = chunk_of(table_.columns, num_shards - 1, num_shards);
      return narrowest.numel() >= constraint_.min_columns;
    };
    // A single shard is tried only if a constraint asks for this sharding, and the table may use
    // only one rank (or host).
    const int fewest_shards = is_asked_for(sharding) ? std::min(2, most_shards) : 2;
    for (int num_shards = fewest_shards; num_shards <= most_shards; ++num_shards) {
      const bool is_tried = num_shards <= kMostColumnShardsTriedSingly ||
                            num_shards == most_shards || (num_shards & (num_shards - 1)) == 0;
      if (!is_tried || !(num_shards == 1 || is_wide_enough(num_shards))) continue;
      switch (sharding) {
        case TableSharding::grid:
          add(sharding, num_shards, ranks_per_host_, num_shards);
          break;
        case TableSharding::table_column_wise:
          add(sharding, num_shards, 1, 1);
          break;
        default:
          add(sharding, num_shards, 1, 0);
      }
    }
  }

  void add(TableSharding sharding, int num_column_shards, int num_row_shards, int num_hosts) {
    ShardingCandidate candidate{
        .sharding = sharding, .num_column_shards = num_column_shards, .num_hosts = num_hosts};
    const bool shares_a_host = sharding == TableSharding::table_column_wise;
    const double row_sums_link =
        shares_a_host ? options_.bandwidths.within_host : model_.slowest_link();
    for (int column = 0; column < num_column_shards; ++column) {
      const std::int64_t width = chunk_of(table_.columns, column, num_column_shards).numel();
      for (int row = 0; row < num_row_shards; ++row) {
        const std::int64_t rows = chunk_of(table_.rows, row, num_row_shards).numel();
        candidate.shards.push_back(model_.shard(rows, width, num_column_shards, row_sums_link));
      }
    }
    push(std::move(candidate));
  }

  void push(ShardingCandidate candidate) {
    for (const ShardCost& shard : candidate.shards) {
      candidate.total_nbytes += shard.nbytes;
      candidate.total_seconds += shard.seconds;
    }
    candidates_.push_back(std::move(candidate));
  }

  [[noreturn]] void refuse() const {
    std::string expected;
    for (const TableSharding sharding : constraint_.shardings) {
      expected.append(expected.empty() ? "" : " or ").append(table_sharding_name(sharding));
    }
    const auto counted_int = [](int count, std::string_view noun) {
      return counted(static_cast<std::uint64_t>(count), noun);
    };
    const std::string found =
        std::to_string(num_ranks_) + " of " + counted_int(options_.world_size, "rank") +
        " allowed, " + counted_int(num_hosts_, "host") + " with all of its " +
        counted_int(ranks_per_host_, "rank") + ", and " + std::to_string(table_.columns) +
        " columns in shards of at least " + std::to_string(constraint_.min_columns);
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = table_.name}, "constraint",
                          "enough ranks and columns for " + expected, found);
  }

  const TableSize& table_;
  const TableConstraint& constraint_;
  const PlannerOptions& options_;
  const CostModel model_;
  const int num_ranks_;
  const int num_hosts_;
  const int ranks_per_host_;
  std::vector<ShardingCandidate> candidates_;
};

}  // namespace

int num_ranks_per_host(const PlannerOptions& options) {
  return options.ranks_per_host == 0 ? options.world_size : options.ranks_per_host;
}

std::string ShardingCandidate::in_words() const {
  std::string text(table_sharding_name(sharding));
  if (sharding == TableSharding::table_wise || sharding == TableSharding::data_parallel) {
    return text;
  }
  return text + " over " + counted(shards.size(), "rank");
}

std::vector<ShardingCandidate> sharding_candidates(const TableSize& table,
                                                   const TableConstraint& constraint,
                                                   const AllowedRanks& allowed,
                                                   const PlannerOptions& options) {
  return CandidateList(table, constraint, allowed, options).all();
}

double batch_nbytes(const TableSize& table, const PlannerOptions& options) {
  const double bags = static_cast<double>(options.batch_size) * table.num_features;
  return bags * (table.pooling_factor * id_nbytes(table) + kLengthNbytes +
                 2 * static_cast<double>(table.columns) * kPooledItemsize);
}

double table_nbytes(const TableSize& table) {
  const auto rows = static_cast<double>(table.rows);
  const auto columns = static_cast<double>(table.columns);
  const double of_element = static_cast<double>(itemsize(table.dtype)) + gradient_itemsize(table) +
                            static_cast<double>(table.state_nbytes_per_element);
  return rows * (columns * of_element + static_cast<double>(table.state_nbytes_per_row));
}

}  // namespace tessera
