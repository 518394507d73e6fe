#include "runtime/fsdp/collective_agreement.h"

#include <algorithm>
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
              {"text", request.text},
              {"has_failed", request.has_failed}}
      .dump();
}

Request decoded(const std::string& text) {
  const json object = json::parse(text);
  return {static_cast<Direction>(object.at("direction").get<int>()),
          proposal_in(object.at("proposal")), object.at("text").get<std::string>(),
          object.at("has_failed").get<bool>()};
}

std::string name_of(Direction direction) {
  return direction == Direction::forward ? "the forward" : "the backward";
}

/// Throws if some ranks need `meeting` next and others do not.
void check_all_meet(std::span<const Request> requests, const Collective& meeting,
                    const std::string& group_name) {
  const auto wants_it = [&](const Request& request) {
    return request.proposal && request.proposal->what == meeting;
  };
  const auto wanting = std::ranges::find_if(requests, wants_it);
  const auto other = std::ranges::find_if_not(requests, wants_it);
  if (other == requests.end()) return;
  const auto rank_of = [&](auto request) { return std::to_string(request - requests.begin()); };
  throw Error::expected(
      ErrorKind::mismatch, {}, "order of collectives",
      "all ranks of " + group_name + " to " + wanting->text + " in " + name_of(wanting->direction),
      "rank " + rank_of(wanting) + " ready to do so, but rank " + rank_of(other) + " about to " +
          other->text);
}

}  // namespace

std::optional<Proposal> choose(std::span<const Request> requests, const std::string& group_name) {
  TESSERA_CHECK(!requests.empty());
  const Request& first = requests.front();
  std::optional<Proposal> chosen;
  const auto goes_before = [&](const Collective& a, const Collective& b) {
    if (a.verb != b.verb) return a.verb == Verb::reduce || b.verb == Verb::meet;
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
                            "does one rank run more forwards or backwards than another?");
    }
    if (!request.proposal) continue;
    if (!chosen || goes_before(request.proposal->what, chosen->what)) {
      chosen = request.proposal;
    } else if (request.proposal->what == chosen->what) {
      // Takes the last of the proposed positions, which is after all entries that these ranks have
      // needed so far.
      chosen->insert_at = std::max(chosen->insert_at, request.proposal->insert_at);
    }
  }
  if (chosen && chosen->what.verb == Verb::meet) {
    if (std::ranges::any_of(requests, &Request::has_failed)) return std::nullopt;
    check_all_meet(requests, chosen->what, group_name);
  }
  return chosen;
}

std::optional<Proposal> CollectiveAgreement::agree(const Request& request) {
  if (group_ == nullptr) return choose({&request, 1}, "");
  const std::string result =
      consensus_.decide(encoded(request), request.text, [&](const std::vector<std::string>& said) {
        std::vector<Request> requests;
        std::ranges::transform(said, std::back_inserter(requests), decoded);
        return to_json(choose(requests, group_->name())).dump();
      });
  return proposal_in(json::parse(result));
}

}  // namespace tessera::fsdp
