#include "runtime/fsdp/agreement.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::fsdp {
namespace {

using nlohmann::json;
using Direction = PhaseKey::Direction;
using Proposal = CollectiveSchedule::Proposal;
using Verb = Collective::Verb;

json to_json(const std::optional<Proposal>& proposal) {
  if (!proposal) return nullptr;
  json object = {{"verb", static_cast<int>(proposal->what.verb)},
                 {"handle", proposal->what.handle}};
  if (proposal->insert_at) object["insert_at"] = *proposal->insert_at;
  return object;
}

std::optional<Proposal> proposal_in(const json& object) {
  if (object.is_null()) return std::nullopt;
  Proposal proposal{
      {static_cast<Verb>(object.at("verb").get<int>()), object.at("handle").get<std::size_t>()},
      std::nullopt};
  if (object.contains("insert_at")) proposal.insert_at = object["insert_at"].get<std::size_t>();
  return proposal;
}

std::string encoded(const Request& request) {
  return json{{"direction", static_cast<int>(request.direction)},
              {"proposal", to_json(request.proposal)},
              {"text", request.text}}
      .dump();
}

Request decoded(const std::string& text) {
  const json object = json::parse(text);
  return {static_cast<Direction>(object.at("direction").get<int>()),
          proposal_in(object.at("proposal")), object.at("text").get<std::string>()};
}

std::string name_of(Direction direction) {
  return direction == Direction::forward ? "the forward" : "the backward";
}

}  // namespace

std::optional<Proposal> choose(std::span<const Request> requests, const std::string& group_name) {
  TESSERA_CHECK(!requests.empty());
  const Request& first = requests.front();
  std::optional<Proposal> chosen;
  const auto goes_before = [&](const Collective& a, const Collective& b) {
    if (a.verb != b.verb) return a.verb == Verb::reduce;
    const bool is_forward = first.direction == Direction::forward;
    return is_forward ? a.handle < b.handle : a.handle > b.handle;
  };
  for (std::size_t rank = 0; rank < requests.size(); ++rank) {
    const Request& request = requests[rank];
    if (request.direction != first.direction) {
      throw Error::expected(ErrorKind::mismatch, {}, "order of collectives",
                            "all ranks of " + group_name + " in the same phase",
                            first.text + " in " + name_of(first.direction) + " on rank 0, " +
                                request.text + " in " + name_of(request.direction) + " on rank " +
                                std::to_string(rank),
                            "another number of forwards or backwards on one rank?");
    }
    if (!request.proposal) continue;
    if (!chosen || goes_before(request.proposal->what, chosen->what)) {
      chosen = request.proposal;
    } else if (request.proposal->what == chosen->what) {
      // Where one place serves the rank that has come furthest, it serves the others too.
      chosen->insert_at = std::max(chosen->insert_at, request.proposal->insert_at);
    }
  }
  return chosen;
}

/// Gives each rank what `decide` makes of what all ranks say, or throws what it throws.
std::string Agreement::exchange(
    const std::string& own, const std::string& about_to,
    const std::function<std::string(const std::vector<std::string>&)>& decide) {
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
      decision["result"] = decide(said);
    } catch (const Error& error) {
      decision["kind"] = static_cast<int>(error.kind());
      decision["error"] = error.what();
    }
    set(decision_key, decision.dump());
    if (last_number_) {  // all have read what was decided before, as they have asked again
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

std::optional<Proposal> Agreement::agree(const Request& request) {
  if (group_ == nullptr) return choose({&request, 1}, "");
  const std::string result =
      exchange(encoded(request), request.text, [&](const std::vector<std::string>& said) {
        std::vector<Request> requests;
        std::ranges::transform(said, std::back_inserter(requests), decoded);
        return to_json(choose(requests, group_->name())).dump();
      });
  return proposal_in(json::parse(result));
}

void Agreement::require_equal(const std::string& what, const std::vector<std::string>& lines) {
  if (group_ == nullptr) return;
  exchange(json(lines).dump(), "compare its " + what, [&](const std::vector<std::string>& said) {
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

}  // namespace tessera::fsdp
