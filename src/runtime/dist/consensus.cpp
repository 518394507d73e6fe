#include "runtime/dist/consensus.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::dist {

using nlohmann::json;

std::string Consensus::decide(
    const std::string& own, const std::string& about_to,
    const std::function<std::string(const std::vector<std::string>&)>& decision_of) {
  c10d::Store& store = *group_->store();
  const std::uint64_t number = group_->next_number();
  const auto key_of = [](std::uint64_t round, const std::string& name) {
    return "agree/" + std::to_string(round) + "/" + name;
  };
  const auto own_key = [&](int rank) { return key_of(number, std::to_string(rank)); };
  const auto get = [&](const std::string& key) {
    const std::vector<std::uint8_t> bytes = store.get(key);
    return std::string(bytes.begin(), bytes.end());
  };
  const auto set = [&](const std::string& key, const std::string& text) {
    store.set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
  };
  const auto nothing_said = [&](const std::string& who) {
    return Error(ErrorKind::io, {},
                 "rank " + std::to_string(group_->rank()) + " (" + group_->name() +
                     ") is about to " + about_to + "; " + who + " said nothing in time");
  };
  const std::string decision_key = key_of(number, "decision");
  json decision;
  set(own_key(group_->rank()), own);
  if (group_->rank() == 0) {
    std::vector<std::string> said{own};
    try {
      for (int rank = 1; rank < group_->size(); ++rank) {
        try {
          said.push_back(get(own_key(rank)));
        } catch (const std::exception&) {
          throw nothing_said("rank " + std::to_string(rank));
        }
      }
      decision["result"] = decision_of(said);
    } catch (const Error& error) {
      decision["kind"] = static_cast<int>(error.kind());
      decision["error"] = error.what();
    }
    set(decision_key, decision.dump());
    if (last_number_) {  // all ranks sent a new request, so all have read the last result
      for (int rank = 0; rank < group_->size(); ++rank) {
        store.deleteKey(key_of(*last_number_, std::to_string(rank)));
      }
      store.deleteKey(key_of(*last_number_, "decision"));
    }
    last_number_ = number;
  } else {
    try {
      decision = json::parse(get(decision_key));
    } catch (const std::exception&) {
      std::string silent;
      for (int rank = 0; rank < group_->size(); ++rank) {
        if (store.check({own_key(rank)})) continue;
        silent += (silent.empty() ? "rank " : ", rank ") + std::to_string(rank);
      }
      throw nothing_said(silent.empty() ? "rank 0" : silent);
    }
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
                            "a model that is built otherwise on one rank?");
    }
    return std::string();
  });
}

}  // namespace tessera::dist
