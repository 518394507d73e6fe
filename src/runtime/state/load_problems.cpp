#include "runtime/state/load_problems.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::state {
namespace {

constexpr std::size_t kMaxLines = 1000;

/// Returns in words what a name of a checkpoint belongs to: `the model`.
std::string_view owner_of(const std::string& fqn) {
  if (fqn.starts_with("model.")) return "the model";
  if (fqn.starts_with("optim.")) return "the optimizer";
  return "this TrainState";
}

}  // namespace

void add_unexpected(const StateDict::Item& item, LoadReport& report) {
  constexpr std::string_view kFound[] = {"a tensor", "a value", "an alias"};  // as in StateEntry
  report.add("unexpected", item.fqn, "nothing of that name",
             std::string(kFound[item.entry.index()]));
}

formats::Finding tied_problem(const std::string& fqn, const std::string& first) {
  return {formats::Finding::Severity::error,
          "tied tensors",
          {.fqn = fqn},
          "the elements of " + first + ", because both names are one tensor in the model",
          "other elements"};
}

std::string line_of(const formats::Finding& finding, const LoadSides& sides) {
  if (finding.remedy.action == Remedy::Action::give_flat_layout) {
    return finding_to_error(finding).line_with(
        "ckpt-reshard --flat-layout FILE makes a checkpoint that can be loaded");
  }
  if (finding.rule != "unexpected") return formats::finding_to_string(finding);
  const std::string_view to = sides.to.empty() ? owner_of(finding.where.fqn) : sides.to;
  const bool is_named = finding.found.starts_with("parameter ");  // a parameter in a list of names
  return Error(ErrorKind::mismatch, finding.where,
               "unexpected: " + std::string(sides.from) + " has " + finding.found +
                   (is_named ? ", but " : " of this name, but ") + std::string(to) + " does not")
      .what();
}

void refuse_lines(const std::string& what, std::size_t num_problems,
                  const std::vector<std::string>& lines, const std::vector<std::string>& hints) {
  if (num_problems == 0) return;
  std::string text;
  for (std::size_t i = 0; i < std::min(lines.size(), kMaxLines); ++i) {
    text += (i == 0 ? "" : "\n") + lines[i];
  }
  if (lines.size() > kMaxLines) {
    text += "\nand " + std::to_string(lines.size() - kMaxLines) + " more";
  }
  for (const std::string& hint : hints) text += "\nhint: " + hint;
  throw Error::listing(
      ErrorKind::mismatch, {},
      what + ": " + std::to_string(num_problems) + (num_problems == 1 ? " problem" : " problems"),
      text);
}

void refuse_problems(const std::string& what, const std::vector<formats::Finding>& problems,
                     const std::vector<std::string>& hints, const LoadSides& sides) {
  std::vector<std::string> lines;
  for (const formats::Finding& problem : problems) lines.push_back(line_of(problem, sides));
  refuse_lines(what, problems.size(), lines, hints);
}

void rethrow_text(ErrorKind kind, std::string_view text) {
  const std::size_t end = std::min(text.find('\n'), text.size());
  throw Error::listing(kind, {}, text.substr(0, end), text.substr(std::min(end + 1, text.size())));
}

}  // namespace tessera::state
