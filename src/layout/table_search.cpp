#include "layout/table_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace tessera {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();
constexpr int kNumBisections = 10;
constexpr int kMostMovesTried = 20000;
constexpr std::size_t kMostTablesCombined = 12;
constexpr int kMostPlacesCombined = 20000;
constexpr double kWorthwhile = 1e-3;  // the least relative gain that counts

/// The order in which the search places tables, and tries the candidates of each table.
struct Attempt {
  std::vector<std::size_t> tables;                   // in the order of placement
  std::vector<std::vector<std::size_t>> candidates;  // indexed by table, in the order of trying
  LoadOrder load_order;
};

template <class Key>
std::vector<std::size_t> sorted_by(std::size_t count, Key key) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  return order;
}

/// Sorts each table's candidates by `measure`.
template <class Measure>
std::vector<std::vector<std::size_t>> sorted_candidates(std::span<const PlannerTable> tables,
                                                        Measure measure) {
  std::vector<std::vector<std::size_t>> orders;
  for (const PlannerTable& table : tables) {
    orders.push_back(sorted_by(table.candidates.size(),
                               [&](std::size_t c) { return measure(table.candidates[c]); }));
  }
  return orders;
}

/// Returns the tables by the least memory that each needs, largest first.
std::vector<std::size_t> by_nbytes(std::span<const PlannerTable> tables) {
  return sorted_by(tables.size(), [&](std::size_t t) {
    std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
    for (const ShardingCandidate& candidate : tables[t].candidates) {
      least = std::min(least, candidate.total_nbytes);
    }
    return std::numeric_limits<std::uint64_t>::max() - least;
  });
}

std::vector<std::size_t> by_seconds(std::span<const PlannerTable> tables) {
  return sorted_by(tables.size(),
                   [&](std::size_t t) { return -tables[t].candidates.front().total_seconds; });
}

std::vector<Attempt> attempts_for(std::span<const PlannerTable> tables) {
  const auto least_work_first =
      sorted_candidates(tables, [](const ShardingCandidate& c) { return c.total_seconds; });
  const auto least_memory_first =
      sorted_candidates(tables, [](const ShardingCandidate& c) { return c.total_nbytes; });
  const auto most_even_first =
      sorted_candidates(tables, [](const ShardingCandidate& c) { return c.largest_nbytes(); });
  const auto largest_first = by_nbytes(tables);
  return {
      {by_seconds(tables), least_work_first, LoadOrder::by_seconds},
      {largest_first, least_work_first, LoadOrder::by_nbytes},
      {largest_first, least_work_first, LoadOrder::fullest_first},
      {largest_first, least_memory_first, LoadOrder::fullest_first},
      {largest_first, most_even_first, LoadOrder::by_nbytes},
  };
}

/// Places the tables one by one; a table that does not fit anywhere gets no Choice.
Assignment fill(const Attempt& attempt, const Assignment& empty, double limit_seconds) {
  Assignment assignment = empty;
  for (const std::size_t t : attempt.tables) {
    for (const std::size_t c : attempt.candidates[t]) {
      auto choice = assignment.find_ranks(t, c, limit_seconds, attempt.load_order);
      if (!choice) continue;
      assignment.put(t, std::move(*choice));
      break;
    }
  }
  return assignment;
}

std::size_t num_left_out(const Assignment& assignment) {
  std::size_t count = 0;
  for (std::size_t t = 0; t < assignment.tables().size(); ++t) {
    if (!assignment.choice(t)) ++count;
  }
  return count;
}

bool is_complete(const Assignment& assignment) {
  return num_left_out(assignment) == 0;
}

/// Returns a lower bound of the slowest rank's time, for any placement.
double least_seconds(std::span<const PlannerTable> tables, int world_size) {
  double work = 0;
  double longest = 0;
  for (const PlannerTable& table : tables) {
    work += table.candidates.front().total_seconds;
    double shortest = kNoLimit;
    for (const ShardingCandidate& candidate : table.candidates) {
      shortest = std::min(shortest, candidate.largest_seconds());
    }
    longest = std::max(longest, shortest);
  }
  return std::max(work / world_size, longest);
}

/// Searches by bisection for the lowest limit on a rank's time at which every table finds a place.
/// Returns the last complete placement; nothing if there was none.
std::optional<Assignment> tighten(const Attempt& attempt, const Assignment& empty, double low) {
  std::optional<Assignment> best;
  Assignment first = fill(attempt, empty, kNoLimit);
  double high = first.score().slowest_seconds;
  if (is_complete(first)) best = std::move(first);
  for (int i = 0; i < kNumBisections && low < high; ++i) {
    const double middle = (low + high) / 2;
    Assignment assignment = fill(attempt, empty, middle);
    if (is_complete(assignment)) {
      high = assignment.score().slowest_seconds;
      best = std::move(assignment);
    } else {
      low = middle;
    }
  }
  return best;
}

/// A search through the combinations of all tables' candidates, for kMostTablesCombined tables or
/// fewer. Each candidate is placed on the ranks that come first in a LoadOrder.
class Combination {
 public:
  Combination(const Assignment& empty, std::optional<Assignment> best)
      : assignment_(empty),
        best_(std::move(best)),
        order_(by_nbytes(empty.tables())),
        work_from_(order_.size() + 1) {
    for (std::size_t i = order_.size(); i-- > 0;) {
      const PlannerTable& table = empty.tables()[order_[i]];
      work_from_[i] = work_from_[i + 1] + table.candidates.front().total_seconds;
    }
    set_limit();
  }

  std::optional<Assignment> run() {
    place_from(0);
    return std::move(best_);
  }

 private:
  void set_limit() {
    limit_seconds_ = best_ ? best_->score().slowest_seconds * (1 - kWorthwhile) : kNoLimit;
  }

  void place_from(std::size_t i) {
    if (i == order_.size()) {
      best_ = assignment_;
      set_limit();
      return;
    }
    const std::size_t t = order_[i];
    for (std::size_t c = 0; c < assignment_.tables()[t].candidates.size(); ++c) {
      std::vector<int> ranks_before;
      for (const LoadOrder load_order :
           {LoadOrder::by_seconds, LoadOrder::by_nbytes, LoadOrder::fullest_first}) {
        if (--num_places_left_ < 0) return;
        auto choice = assignment_.find_ranks(t, c, limit_seconds_, load_order);
        if (!choice || choice->ranks == ranks_before) continue;
        ranks_before = choice->ranks;
        assignment_.put(t, std::move(*choice));
        if (can_stay_within_limit(i + 1)) place_from(i + 1);
        assignment_.take(t);
      }
    }
  }

  bool can_stay_within_limit(std::size_t i) const {
    double work = work_from_[i];
    for (const ShardCost& load : assignment_.loads()) work += load.seconds;
    return work / static_cast<double>(assignment_.loads().size()) <= limit_seconds_;
  }

  Assignment assignment_;
  std::optional<Assignment> best_;
  std::vector<std::size_t> order_;
  std::vector<double> work_from_;  // [i]: least total time of tables i, i + 1, …
  double limit_seconds_ = kNoLimit;
  int num_places_left_ = kMostPlacesCombined;
};

/// A search that moves tables away from the slowest rank, one or two at a time, while this helps.
class Improvement {
 public:
  explicit Improvement(Assignment assignment) : assignment_(std::move(assignment)) {}

  Assignment run() {
    while (num_moves_left_ > 0 && (move_one() || move_two())) {
    }
    return std::move(assignment_);
  }

 private:
  struct Move {
    std::vector<std::pair<std::size_t, Choice>> choices;
    Assignment::Score score;
  };

  bool move_one() {
    best_ = {{}, assignment_.score()};
    for (const std::size_t t : tables_of_slowest_rank()) {
      const Choice old = take(t);
      try_all(t, [&](const Choice& choice) { keep_if_better({{t, choice}}); });
      assignment_.put(t, old);
    }
    return apply_best();
  }

  bool move_two() {
    best_ = {{}, assignment_.score()};
    for (const std::size_t t : tables_of_slowest_rank()) {
      for (std::size_t u = 0; u < assignment_.tables().size() && num_moves_left_ > 0; ++u) {
        if (u == t) continue;
        const Choice old_t = take(t);
        const Choice old_u = take(u);
        try_all(t, [&](const Choice& of_t) {
          try_all(u, [&](const Choice& of_u) { keep_if_better({{t, of_t}, {u, of_u}}); });
        });
        assignment_.put(u, old_u);
        assignment_.put(t, old_t);
      }
    }
    return apply_best();
  }

  std::vector<std::size_t> tables_of_slowest_rank() const {
    const int slowest = assignment_.slowest_rank();
    std::vector<std::size_t> tables;
    for (std::size_t t = 0; t < assignment_.tables().size(); ++t) {
      const std::vector<int>& ranks = assignment_.choice(t)->ranks;
      if (std::find(ranks.begin(), ranks.end(), slowest) != ranks.end()) tables.push_back(t);
    }
    return tables;
  }

  Choice take(std::size_t table) {
    Choice old = *assignment_.choice(table);
    assignment_.take(table);
    return old;
  }

  /// Puts each candidate in turn on the ranks with the least time; calls `visit` while it is there.
  template <class Visit>
  void try_all(std::size_t table, Visit visit) {
    const std::size_t num_candidates = assignment_.tables()[table].candidates.size();
    for (std::size_t c = 0; c < num_candidates && num_moves_left_ > 0; ++c) {
      --num_moves_left_;
      const auto choice = assignment_.find_ranks(table, c, kNoLimit, LoadOrder::by_seconds);
      if (!choice) continue;
      assignment_.put(table, *choice);
      visit(*choice);
      assignment_.take(table);
    }
  }

  void keep_if_better(std::vector<std::pair<std::size_t, Choice>> choices) {
    const Assignment::Score score = assignment_.score();
    if (score.is_better_than(best_.score)) best_ = {std::move(choices), score};
  }

  bool apply_best() {
    for (const auto& [table, choice] : best_.choices) assignment_.take(table);
    for (const auto& [table, choice] : best_.choices) assignment_.put(table, choice);
    return !best_.choices.empty();
  }

  Assignment assignment_;
  Move best_;
  int num_moves_left_ = kMostMovesTried;
};

}  // namespace

Assignment::Assignment(std::span<const PlannerTable> tables, const PlannerMachine& machine)
    : tables_(tables),
      machine_(machine),
      choices_(tables.size()),
      loads_(static_cast<std::size_t>(machine.world_size)) {}

bool Assignment::fits(int rank, const ShardCost& shard, double limit_seconds) const {
  const ShardCost& load = loads_[static_cast<std::size_t>(rank)];
  return shard.nbytes <= machine_.capacity_nbytes - load.nbytes &&
         load.seconds + shard.seconds <= limit_seconds;
}

double Assignment::load_of(int rank, LoadOrder order) const {
  const ShardCost& load = loads_[static_cast<std::size_t>(rank)];
  switch (order) {
    case LoadOrder::by_seconds:
      return load.seconds;
    case LoadOrder::by_nbytes:
      return static_cast<double>(load.nbytes);
    case LoadOrder::fullest_first:
      return -static_cast<double>(load.nbytes);
  }
  return 0;
}

std::vector<int> Assignment::pick(std::vector<int> ranks, std::span<const ShardCost> shards,
                                  double limit_seconds, LoadOrder order) const {
  if (ranks.size() > shards.size()) {
    std::stable_sort(ranks.begin(), ranks.end(),
                     [&](int a, int b) { return load_of(a, order) < load_of(b, order); });
  }
  std::vector<int> picked;
  for (const int rank : ranks) {
    if (picked.size() == shards.size()) break;
    if (fits(rank, shards[picked.size()], limit_seconds)) picked.push_back(rank);
  }
  if (picked.size() < shards.size()) return {};
  if (shards.front().nbytes == shards.back().nbytes) std::sort(picked.begin(), picked.end());
  return picked;
}

std::vector<int> Assignment::pick_hosts(const AllowedRanks& allowed,
                                        const ShardingCandidate& candidate, double limit_seconds,
                                        LoadOrder order) const {
  const auto num_hosts = static_cast<std::size_t>(candidate.num_hosts);
  const std::span shards(candidate.shards.data(), candidate.shards.size() / num_hosts);
  using Host = std::pair<double, std::vector<int>>;  // largest load of its picked ranks; the ranks
  std::vector<Host> hosts;
  for (const int host : allowed.hosts) {
    std::vector<int> ranks(static_cast<std::size_t>(machine_.ranks_per_host));
    std::iota(ranks.begin(), ranks.end(), host * machine_.ranks_per_host);
    ranks = pick(std::move(ranks), shards, limit_seconds, order);
    if (ranks.empty()) continue;
    double most = -kNoLimit;
    for (const int rank : ranks) {
      most = std::max(most, load_of(rank, order));
    }
    hosts.emplace_back(most, std::move(ranks));
  }
  if (hosts.size() < num_hosts) return {};
  std::stable_sort(hosts.begin(), hosts.end(),
                   [](const Host& a, const Host& b) { return a.first < b.first; });
  std::vector<int> picked;
  for (std::size_t h = 0; h < num_hosts; ++h) {
    picked.insert(picked.end(), hosts[h].second.begin(), hosts[h].second.end());
  }
  return picked;
}

std::optional<Choice> Assignment::find_ranks(std::size_t table, std::size_t candidate,
                                             double limit_seconds, LoadOrder order) const {
  const AllowedRanks& allowed = tables_[table].allowed;
  const ShardingCandidate& way = tables_[table].candidates[candidate];
  if (way.largest_nbytes() > machine_.capacity_nbytes || way.largest_seconds() > limit_seconds) {
    return std::nullopt;
  }
  std::vector<int> ranks = way.num_hosts == 0
                               ? pick(allowed.ranks, way.shards, limit_seconds, order)
                               : pick_hosts(allowed, way, limit_seconds, order);
  if (ranks.empty()) return std::nullopt;
  return Choice{candidate, std::move(ranks)};
}

void Assignment::put(std::size_t table, Choice choice) {
  choices_[table] = std::move(choice);
  const ShardingCandidate& way = chosen(table);
  for (std::size_t i = 0; i < way.shards.size(); ++i) {
    ShardCost& load = loads_[static_cast<std::size_t>(choices_[table]->ranks[i])];
    load.nbytes += way.shards[i].nbytes;
    load.seconds += way.shards[i].seconds;
  }
}

void Assignment::take(std::size_t table) {
  const ShardingCandidate& way = chosen(table);
  for (std::size_t i = 0; i < way.shards.size(); ++i) {
    ShardCost& load = loads_[static_cast<std::size_t>(choices_[table]->ranks[i])];
    load.nbytes -= way.shards[i].nbytes;
    load.seconds -= way.shards[i].seconds;
  }
  choices_[table].reset();
}

int Assignment::slowest_rank() const {
  const auto slowest = std::max_element(
      loads_.begin(), loads_.end(),
      [](const ShardCost& a, const ShardCost& b) { return a.seconds < b.seconds; });
  return static_cast<int>(slowest - loads_.begin());
}

bool Assignment::Score::is_better_than(const Score& other) const {
  if (slowest_seconds < other.slowest_seconds * (1 - kWorthwhile)) return true;
  return slowest_seconds <= other.slowest_seconds * (1 + kWorthwhile) &&
         squares < other.squares * (1 - kWorthwhile);
}

Assignment::Score Assignment::score() const {
  Score score;
  for (const ShardCost& load : loads_) {
    score.slowest_seconds = std::max(score.slowest_seconds, load.seconds);
    score.squares += load.seconds * load.seconds;
  }
  return score;
}

std::optional<Assignment> find_assignment(std::span<const PlannerTable> tables,
                                          const PlannerMachine& machine) {
  const Assignment empty(tables, machine);
  const double low = least_seconds(tables, machine.world_size);
  std::optional<Assignment> best;
  for (const Attempt& attempt : attempts_for(tables)) {
    auto found = tighten(attempt, empty, low);
    if (!found) continue;
    Assignment improved = Improvement(std::move(*found)).run();
    if (!best || improved.score().is_better_than(best->score())) best = std::move(improved);
  }
  if (tables.size() > kMostTablesCombined) return best;
  return Combination(empty, std::move(best)).run();
}

Assignment place_what_fits(std::span<const PlannerTable> tables, const PlannerMachine& machine) {
  const Assignment empty(tables, machine);
  Assignment fullest = empty;
  for (const Attempt& attempt : attempts_for(tables)) {
    Assignment filled = fill(attempt, empty, kNoLimit);
    if (num_left_out(filled) < num_left_out(fullest)) fullest = std::move(filled);
  }
  return fullest;
}

}  // namespace tessera
