#include "runtime/dist/consensus.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::dist {

using nlohmann::json;

namespace {

using DecisionOf = std::function<std::string(const std::vector<std::string>&)>;

std::string key_of(std::uint64_t round, const std::string& name) {
  return "agree/" + std::to_string(round) + "/" + name;
}
std::string request_key(std::uint64_t round, int rank) {
  return key_of(round, std::to_string(rank));
}
std::string decision_key(std::uint64_t round) {
  return key_of(round, "decision");
}

std::string get(c10d::Store& store, const std::string& key) {
  const std::vector<std::uint8_t> bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}
void set(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
}

/// Returns the error about ranks that did not send their message.
Error nothing_sent(const Group& group, const std::string& about_to, const std::string& who) {
  return {
      ErrorKind::io,
      {},
      "rank " + std::to_string(group.rank()) + " (" + group.name() + ") wants to " + about_to +
          ", but " + who +
          " sent nothing before the timeout (did it stop, or run other code? models of different "
          "meshes in one backward need the same units on all ranks)"};
}

/// Runs on rank 0. Waits for the requests of all ranks, and returns the decision, or the error that
/// all ranks will throw.
json make_decision(Group& group, std::uint64_t round, const std::string& own,
                   const std::string& about_to, const DecisionOf& decision_of) {
  json decision;
  std::vector<std::string> requests{own};
  try {
    for (int rank = 1; rank < group.size(); ++rank) {
      try {
        requests.push_back(get(*group.store(), request_key(round, rank)));
      } catch (const std::exception&) {
        throw nothing_sent(group, about_to, "rank " + std::to_string(rank));
      }
    }
    decision["result"] = decision_of(requests);
  } catch (const Error& error) {
    decision["kind"] = static_cast<int>(error.kind());
    decision["error"] = error.what();
  }
  return decision;
}

/// Runs on the ranks other than 0. Waits for rank 0's decision.
json wait_for_decision(Group& group, std::uint64_t round, const std::string& about_to) {
  c10d::Store& store = *group.store();
  try {
    return json::parse(get(store, decision_key(round)));
  } catch (const std::exception&) {
    std::string silent;
    for (int rank = 0; rank < group.size(); ++rank) {
      if (store.check({request_key(round, rank)})) continue;
      silent += (silent.empty() ? "rank " : ", rank ") + std::to_string(rank);
    }
    throw nothing_sent(group, about_to, silent.empty() ? "rank 0" : silent);
  }
}

void delete_keys(Group& group, std::uint64_t round) {
  c10d::Store& store = *group.store();
  for (int rank = 0; rank < group.size(); ++rank) store.deleteKey(request_key(round, rank));
  store.deleteKey(decision_key(round));
}

}  // namespace

std::string Consensus::decide(const std::string& own, const std::string& about_to,
                              const DecisionOf& decision_of) {
  c10d::Store& store = *group_->store();
  const std::uint64_t round = group_->next_number();
  set(store, request_key(round, group_->rank()), own);
  json decision;
  if (group_->rank() == 0) {
    decision = make_decision(*group_, round, own, about_to, decision_of);
    set(store, decision_key(round), decision.dump());
    // The keys of the previous round can be deleted: all ranks have sent a request for this round,
    // so all have read the previous result.
    if (last_number_) delete_keys(*group_, *last_number_);
    last_number_ = round;
  } else {
    decision = wait_for_decision(*group_, round, about_to);
  }
  if (decision.contains("error")) {
    throw Error(static_cast<ErrorKind>(decision["kind"].get<int>()), {},
                decision["error"].get<std::string>());
  }
  return decision["result"].get<std::string>();
}

void Consensus::require_equal(const std::string& what, const std::vector<std::string>& lines) {
  if (group_ == nullptr) return;
  decide(json(lines).dump(), "compare its " + what, [&](const std::vector<std::string>& said) {
    for (std::size_t rank = 1; rank < said.size(); ++rank) {
      const std::vector<std::string> other = json::parse(said[rank]);
      const auto [own_line, other_line] = std::ranges::mismatch(lines, other);
      if (own_line == lines.end() && other_line == other.end()) continue;
      const auto text = [](const auto& line, const auto& end) {
        return line == end ? std::string("none") : *line;
      };
      throw Error::expected(ErrorKind::mismatch, {}, what,
                            "the same on all ranks of " + group_->name(),
                            text(own_line, lines.end()) + " on rank 0, " +
                                text(other_line, other.end()) + " on rank " + std::to_string(rank),
                            "did the ranks build different models?");
    }
    return std::string();
  });
}

}  // namespace tessera::dist
