#include "reshard/params_search.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using Groups = std::vector<std::vector<NumberedParam>>;

constexpr std::string_view kParamsRule = "parameters of the optimizer";
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

std::string in_words(const NumberedParam& param) {
  if (!param.shape) {
    return param.number + ", which has no state that tells its shape (low-rank state does not)";
  }
  if (param.is_flat) {
    return param.number + " with " + std::to_string(numel_of(*param.shape)) + " elements";
  }
  return param.number + " of shape " + shape_to_string(*param.shape);
}

bool fits(const NumberedParam& param, const ParamCandidate& candidate) {
  if (!param.shape || *param.shape == candidate.shape) return true;
  return param.is_flat && numel_of(*param.shape) == numel_of(candidate.shape);
}

/// Returns the shape under which parameters with flat state are compared with tensors: `[-1,
/// numel]`, which no tensor has.
Shape flat_key(std::span<const std::int64_t> shape) {
  return {-1, numel_of(shape)};
}
Shape key_of(const NumberedParam& param) {
  return param.is_flat ? flat_key(*param.shape) : *param.shape;
}

[[noreturn]] void refuse(const std::string& path, std::string_view expected,
                         const std::string& found) {
  throw Error::expected(ErrorKind::mismatch, {.path = path}, kParamsRule, expected, found,
                        {Remedy::Action::name_params});
}

[[noreturn]] void refuse_several(const std::string& path, const NumberedParam& param,
                                 const ParamCandidate& first, const ParamCandidate& second) {
  refuse(path, "shapes that tell which number is which parameter",
         "equal shapes: number " + in_words(param) + ", may be " + printable(first.name) + " or " +
             printable(second.name));
}

std::size_t num_params(const Groups& groups) {
  std::size_t num = 0;
  for (const auto& group : groups) num += group.size();
  return num;
}

/// Finds a tensor for each parameter so that each group follows the order of the candidates. A
/// dynamic program over the candidates counts the possible choices, but not beyond two. A state of
/// the program says, after i candidates, how many parameters of each group have a candidate.
class OrderedSearch {
 public:
  OrderedSearch(const Groups& groups, std::span<const ParamCandidate> candidates,
                const std::string& path)
      : groups_(groups), candidates_(candidates), path_(path), num_params_(num_params(groups)) {}

  std::vector<std::size_t> find() {
    refuse_what_fits_nothing();
    find_states();
    count_ways();
    const State start(groups_.size(), 0);
    const auto first = layers_.front().find(start);
    if (first == layers_.front().end() || first->second == 0) refuse_no_order();
    const std::vector<std::size_t> choice = follow(Preference::first);
    if (first->second == 1) return choice;
    const std::vector<std::size_t> other = follow(Preference::last);
    const auto [mine, theirs] = std::ranges::mismatch(choice, other);
    TESSERA_CHECK(mine != choice.end());
    refuse_several(path_, param_at(static_cast<std::size_t>(mine - choice.begin())),
                   candidates_[*mine], candidates_[*theirs]);
  }

 private:
  using State = std::vector<std::uint32_t>;     // by group: how many parameters have a candidate
  using Layer = std::map<State, std::uint8_t>;  // number of ways from a state to the end
  enum class Preference { first, last };

  static constexpr std::size_t kMaxStates = 200'000;
  static constexpr std::size_t kMaxWork = 100'000'000;  // groups looked at

  const NumberedParam& param_at(std::size_t index) const {
    for (const auto& group : groups_) {
      if (index < group.size()) return group[index];
      index -= group.size();
    }
    TESSERA_CHECK(false && "no such parameter");
    return groups_.front().front();
  }

  /// Throws for the first number that has no candidate of its shape, or none after the candidates
  /// of the earlier numbers.
  void refuse_what_fits_nothing() const {
    if (num_params_ > candidates_.size()) {
      refuse(path_, std::to_string(num_params_) + " tensors that may be parameters",
             std::to_string(candidates_.size()));
    }
    for (const auto& group : groups_) {
      std::size_t next = 0;
      for (const NumberedParam& param : group) {
        while (next < candidates_.size() && !fits(param, candidates_[next])) ++next;
        if (next == candidates_.size()) refuse_number(param);
        ++next;
      }
    }
  }

  [[noreturn]] void refuse_number(const NumberedParam& param) const {
    const bool fits_any = std::ranges::any_of(
        candidates_, [&](const ParamCandidate& candidate) { return fits(param, candidate); });
    refuse(path_,
           fits_any ? "a tensor for each number, in the order of the checkpoint"
                    : "a tensor for each number",
           "none for number " + in_words(param));
  }

  /// Throws an error that names the first number for which the longest partial choice has no
  /// candidate.
  [[noreturn]] void refuse_no_order() const {
    const NumberedParam* next = nullptr;
    std::size_t most = 0;
    for (const Layer& layer : layers_) {
      for (const auto& [state, ways] : layer) {
        std::size_t num_done = 0;
        for (const std::uint32_t done : state) num_done += done;
        if (num_done < most) continue;
        most = num_done;
        for (std::size_t g = groups_.size(); g-- > 0;) {
          if (state[g] < groups_[g].size()) next = &groups_[g][state[g]];
        }
      }
    }
    refuse(path_, "a tensor for each number, in the order of the checkpoint",
           "none left for number " + in_words(*next));
  }

  /// Calls `visit(next state, group)` for each way to use candidate `i`: as the next parameter of
  /// `group`, or not at all (then `group` is kNone).
  template <class Visit>
  void for_each_step(std::size_t i, const State& state, const Visit& visit) const {
    std::size_t num_done = 0;
    for (const std::uint32_t done : state) num_done += done;
    const std::size_t num_left = num_params_ - num_done;
    const std::size_t num_behind = candidates_.size() - i - 1;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (state[g] == groups_[g].size() || !fits(groups_[g][state[g]], candidates_[i])) continue;
      State next = state;
      ++next[g];
      visit(next, g);
    }
    if (num_left <= num_behind) visit(state, kNone);
  }

  void find_states() {
    layers_.resize(candidates_.size() + 1);
    layers_[0].emplace(State(groups_.size(), 0), 0);
    std::size_t num_states = 1;
    std::size_t work = 0;
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      for (const auto& [state, ways] : layers_[i]) {
        for_each_step(i, state, [&](const State& next, std::size_t) {
          if (layers_[i + 1].emplace(next, 0).second) ++num_states;
          work += groups_.size();
        });
        work += groups_.size();
        if (num_states <= kMaxStates && work <= kMaxWork) continue;
        refuse(path_, "groups and shapes that leave few possible orders of the names",
               "more than " + std::to_string(kMaxStates) + " to look through");
      }
    }
  }

  void count_ways() {
    constexpr std::uint8_t kEnough = 2;
    State full;
    for (const auto& group : groups_) full.push_back(static_cast<std::uint32_t>(group.size()));
    const auto end = layers_.back().find(full);
    if (end != layers_.back().end()) end->second = 1;
    for (std::size_t i = candidates_.size(); i-- > 0;) {
      for (auto& [state, ways] : layers_[i]) {
        int sum = 0;
        for_each_step(i, state,
                      [&](const State& next, std::size_t) { sum += layers_[i + 1].at(next); });
        ways = static_cast<std::uint8_t>(std::min<int>(sum, kEnough));
      }
    }
  }

  /// Returns one choice. Where several steps lead to the end, takes the first or the last of them.
  std::vector<std::size_t> follow(Preference preference) const {
    std::vector<std::size_t> begin_of_group(1, 0);
    for (const auto& group : groups_)
      begin_of_group.push_back(begin_of_group.back() + group.size());
    std::vector<std::size_t> choice(num_params_, 0);
    State state(groups_.size(), 0);
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      std::optional<std::pair<State, std::size_t>> step;
      for_each_step(i, state, [&](const State& next, std::size_t group) {
        if (layers_[i + 1].at(next) == 0 || (step && preference == Preference::first)) return;
        step.emplace(next, group);
      });
      TESSERA_CHECK(step.has_value());
      const auto& [next, group] = *step;
      if (group != kNone) choice[begin_of_group[group] + state[group]] = i;
      state = next;
    }
    return choice;
  }

  const Groups& groups_;
  std::span<const ParamCandidate> candidates_;
  const std::string& path_;
  std::size_t num_params_;
  std::vector<Layer> layers_;  // one per number of candidates considered
};

}  // namespace

std::vector<std::size_t> params_in_order(const Groups& groups,
                                         std::span<const ParamCandidate> candidates,
                                         const std::string& path) {
  return OrderedSearch(groups, candidates, path).find();
}

std::vector<std::size_t> params_by_shape(const Groups& groups,
                                         std::span<const ParamCandidate> candidates,
                                         const std::string& path) {
  std::map<Shape, std::vector<std::size_t>> by_shape;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    by_shape[candidates[i].shape].push_back(i);
    by_shape[flat_key(candidates[i].shape)].push_back(i);
  }
  std::map<Shape, std::size_t> num_of_shape;
  std::vector<const NumberedParam*> params;
  for (const auto& group : groups) {
    for (const NumberedParam& param : group) {
      params.push_back(&param);
      if (param.shape) ++num_of_shape[key_of(param)];
    }
  }
  for (const NumberedParam* param : params) {
    if (!param->shape) {
      refuse(path,
             "state of every number, to know the parameter's shape (the checkpoint does not record "
             "the order)",
             "number " + in_words(*param));
    }
    const auto found = by_shape.find(key_of(*param));
    if (found == by_shape.end() || found->second.size() < num_of_shape[key_of(*param)]) {
      refuse(path, "a tensor for each number", "none for number " + in_words(*param));
    }
  }
  std::vector<std::size_t> choice;
  for (const NumberedParam* param : params) {
    const std::vector<std::size_t>& found = by_shape[key_of(*param)];
    if (found.size() > 1) {
      refuse_several(path, *param, candidates[found[0]], candidates[found[1]]);
    }
    choice.push_back(found.front());
  }
  return choice;
}

}  // namespace tessera::reshard
