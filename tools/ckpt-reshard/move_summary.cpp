#include "ckpt-reshard/move_summary.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "base/float_text.h"
#include "base/size_text.h"
#include "cli/command_line_remedies.h"
#include "cli/format_rows.h"
#include "cli/json_output.h"
#include "cli/table.h"
#include "reshard/model_names.h"
#include "reshard/moved_names.h"
#include "tessera/formats/format_driver.h"

namespace tessera::cli {
namespace {

using formats::CheckpointReader;
using formats::Finding;
using reshard::Plan;

constexpr int kJsonSchema = 1;
constexpr std::size_t kMaxFindingsShown = 100;
// Few, because most models have some numbers that become zero, which does no harm.
constexpr std::size_t kMaxUnderflowsShown = 10;
constexpr std::size_t kMaxSharesShown = 20;

std::string contents_line(const MoveOptions& options, const Plan& plan) {
  const formats::CheckpointContents& contents = plan.destination;
  std::string line = counted(contents.tensors.size(), "tensor");
  if (!contents.values.empty()) line += ", " + counted(contents.values.size(), "value");
  if (!contents.aliases.empty())
    line += ", " + counted(contents.aliases.size(), "alias", "aliases");
  line += ", " + exact_size(plan.nbytes_to_write) + ", " + std::string(options.format->name());
  if (!formats::holds_whole_tensors(*options.format)) {
    line += " for " + counted(static_cast<std::uint64_t>(contents.world_size), "rank");
  }
  return line;
}

void write_overflows(JsonOutput& json, const Outcome& outcome) {
  json.key("overflows").begin_array();
  for (const reshard::TensorOverflow& overflow : outcome.overflows) {
    json.begin_object();
    json.member("name", outcome.plan.destination.tensors[overflow.tensor_index].meta.fqn);
    json.member("elements", overflow.num_elements);
    json.member("largest", overflow.largest_magnitude);
    json.end_object();
  }
  for (const auto& [name, lost] : outcome.losses_before_recipe) {
    if (lost.num_too_large == 0) continue;
    json.begin_object().member("name", name).member("elements", lost.num_too_large);
    json.member("largest", lost.largest_magnitude).end_object();
  }
  json.end_array();
}

void write_underflows(JsonOutput& json, const Outcome& outcome) {
  json.key("underflows").begin_array();
  for (const reshard::TensorUnderflow& underflow : outcome.underflows) {
    json.begin_object();
    json.member("name", outcome.plan.destination.tensors[underflow.tensor_index].meta.fqn);
    json.member("elements", underflow.num_elements).end_object();
  }
  for (const auto& [name, lost] : outcome.losses_before_recipe) {
    if (lost.num_became_zero == 0) continue;
    json.begin_object().member("name", name).member("elements", lost.num_became_zero).end_object();
  }
  json.end_array();
}

void write_changes(JsonOutput& json, const std::vector<reshard::FormatChangeCount>& changes) {
  json.key("changes").begin_array();
  for (const reshard::FormatChangeCount& counted : changes) {
    json.begin_object().member("kind", reshard::format_change_name(counted.change));
    json.member("count", std::uint64_t{counted.count});
    if (!counted.names.empty()) {
      json.key("names").begin_array();
      for (const std::string& name : counted.names) json.value(name);
      json.end_array();
    }
    json.end_object();
  }
  json.end_array();
}

void write_extra_files(const reshard::ExtraFilesPlan& files, JsonOutput& json) {
  json.key("extra_files").begin_array();
  for (const formats::ExtraFile& file : files.carried) {
    json.begin_object().member("name", file.name).member("nbytes", file.nbytes);
    for (const auto& edit : files.edits) {
      if (edit.name == file.name) json.member("edit", edit.what);
    }
    json.end_object();
  }
  json.end_array();
  json.key("left_files").begin_array();
  for (const auto& left : files.left) {
    json.begin_object().member("name", left.name).member("why", left.why).end_object();
  }
  json.end_array();
}

/// Returns the first names, and how many others there are.
std::string names_in_words(const std::vector<std::string>& names) {
  constexpr std::size_t kMaxNamed = 4;
  const std::size_t num_named = names.size() > kMaxNamed ? kMaxNamed - 1 : names.size();
  std::string text;
  for (std::size_t i = 0; i < num_named; ++i) text += (i > 0 ? ", " : "") + printable(names[i]);
  if (num_named < names.size())
    text += " and " + std::to_string(names.size() - num_named) + " more";
  return text;
}

/// Prints one line about the extra files that are copied, one for each change in a copy, and one
/// about the files that are left out.
void print_extra_files(const reshard::ExtraFilesPlan& files, Terminal& terminal) {
  std::vector<std::string> carried;
  std::uint64_t nbytes = 0;
  for (const formats::ExtraFile& file : files.carried) {
    carried.push_back(file.name);
    nbytes += file.nbytes;
  }
  if (!carried.empty()) {
    terminal.print(counted(carried.size(), "extra file") + ", " + exact_size(nbytes) + ": " +
                   names_in_words(carried) + "\n");
  }
  for (const auto& edit : files.edits) terminal.print(edit.name + ": " + edit.what + "\n");
  std::map<std::string, std::vector<std::string>> left;  // names of files, by reason
  for (const auto& [name, why] : files.left) left[why].push_back(name);
  std::string line;
  for (const auto& [why, names] : left) {
    line += (line.empty() ? "" : "; ") + names_in_words(names) + " (" + why + ")";
  }
  if (!line.empty()) {
    terminal.print(counted(files.left.size(), "extra file") + " not copied: " + line + "\n");
  }
}

/// Returns ` (a, b)`, with at most ten names.
std::string in_brackets(const std::vector<std::string>& names) {
  constexpr std::size_t kMaxNames = 10;
  std::string text;
  for (const std::string& name : std::span(names).first(std::min(names.size(), kMaxNames))) {
    text += (text.empty() ? " (" : ", ") + printable(name);
  }
  if (names.size() > kMaxNames) text += ", and more";
  return text.empty() ? text : text + ")";
}

std::string change_in_words(const reshard::FormatChangeCount& counted_change) {
  using Change = reshard::FormatChange;
  const std::size_t count = counted_change.count;
  const auto words = [&](const char* one, const char* many) {
    return std::to_string(count) + " " + (count == 1 ? one : many);
  };
  switch (counted_change.change) {
    case Change::text_keys:
      return words("key of a dict becomes text", "keys of dicts become text");
    case Change::optimizer_keys:
      return words("parameter number in optimizer state becomes a text key",
                   "parameter numbers in optimizer state become text keys");
    case Change::split_ties:
      return words("tied tensor is stored twice", "tied tensors are stored twice");
    case Change::list_root:
      return "the outermost list becomes a dict";
    case Change::annotations:
      return words("text beside the tensors is left out", "texts beside the tensors are left out");
    case Change::requires_grad:
      return words("tensor loses requires_grad", "tensors lose requires_grad");
    case Change::parameters:
      return words("Parameter becomes a tensor", "Parameters become tensors");
    case Change::shared_memory:
      return words("tensor no longer shares memory with another",
                   "tensors no longer share memory with others");
    case Change::dict_classes:
      return words("OrderedDict or the like becomes a dict",
                   "OrderedDicts or the like become dicts");
    case Change::tuples:
      return words("tuple with a tensor becomes a list", "tuples with tensors become lists");
    case Change::attributes:
      return words("tensor, dict or module loses attributes",
                   "tensors, dicts or modules lose attributes") +
             in_brackets(counted_change.names);
    case Change::value_types:
      return words("value gets a plainer type", "values get plainer types") +
             in_brackets(counted_change.names);
    case Change::dtensors:
      return words("DTensor or ShardedTensor becomes a tensor",
                   "DTensors or ShardedTensors become tensors");
    case Change::tensor_steps:
      return words("step of the optimizer becomes a float32 tensor",
                   "steps of the optimizer become float32 tensors");
    case Change::key_order:
      return words("dict gets its keys in the order of names",
                   "dicts get their keys in the order of names");
    case Change::nested_keys:
      return words(
          "outermost key that begins with 'model.', 'optim.' or 'extra_state.' becomes a key in a "
          "dict",
          "outermost keys that begin with 'model.', 'optim.' or 'extra_state.' become keys in a "
          "dict");
    case Change::model_names:
      return words("tensor gets 'model.' before its name",
                   "tensors get 'model.' before their names");
  }
  return {};
}

/// Prints one line about the changes that formats, renames or a merge cause; nothing if none.
void print_changes(const std::vector<reshard::FormatChangeCount>& changes, Terminal& terminal) {
  std::string line;
  for (const auto& change : changes) line += (line.empty() ? "" : "; ") + change_in_words(change);
  if (line.empty()) return;
  terminal.print("changed: " + line + " (docs/formats/what-each-holds.md)\n");
}

/// The first tensor, value and alias that options leave out; empty if there is none.
struct FirstLeftOut {
  std::string tensor{};
  std::string value{};
  std::string alias{};
  std::string of_rank{};         // of a single rank, which the patterns fit
  std::size_t num_of_ranks = 0;  // entries of that kind
};

/// Finds the first name, in sorted order, of each kind that `count_left_out` counts.
FirstLeftOut first_left_out(const MoveOptions& options,
                            const formats::CheckpointContents& contents) {
  reshard::PlanOptions wanted;
  wanted.format = options.format.value();
  wanted.only = NameSelection(options.only);
  if (options.drop_optimizer) wanted.optimizer = reshard::OptimizerSelection::leave_out;
  const reshard::MovedSelection moved(contents, wanted);
  std::set<std::string_view> targets;  // tensors of which an alias is moved
  FirstLeftOut first;
  const auto take = [](std::string& name, const std::string& candidate) {
    if (name.empty() || candidate < name) name = candidate;
  };
  const auto leave_out = [&](std::string& first_of_kind, const std::string& name) {
    take(first_of_kind, name);
    if (!moved.leaves_out_of_rank(name)) return;
    take(first.of_rank, name);
    ++first.num_of_ranks;
  };
  for (const formats::Alias& alias : contents.aliases) {
    if (moved.contains(alias.fqn)) {
      targets.insert(alias.target);
    } else {
      leave_out(first.alias, alias.fqn);
    }
  }
  for (const formats::TensorEntry& tensor : contents.tensors) {
    if (moved.contains(tensor.meta.fqn)) continue;
    leave_out(targets.contains(tensor.meta.fqn) ? first.alias : first.tensor, tensor.meta.fqn);
  }
  for (const formats::ValueEntry& value : contents.values) {
    if (!moved.contains(value.name)) leave_out(first.value, value.name);
  }
  return first;
}

/// Prints one line about the entries that options leave out: the number and the first name of each
/// kind.
void print_left_out(const MoveOptions& options, const reshard::LeftOut& left,
                    const formats::CheckpointContents& contents, Terminal& terminal) {
  if (left == reshard::LeftOut{}) return;
  const FirstLeftOut first = first_left_out(options, contents);
  std::string what;
  const auto add = [&](std::size_t count, std::string_view one, std::string_view many,
                       const std::string& name) {
    if (count == 0) return;
    what += (what.empty() ? "" : ", ") + counted(count, one, many) + " (" + printable(name) +
            (count > 1 ? ", …)" : ")");
  };
  add(left.tensors, "tensor", "tensors", first.tensor);
  add(left.values, "value", "values", first.value);
  add(left.aliases, "alias", "aliases", first.alias);
  std::string by = options.only.empty() ? "" : options.only_option;
  if (options.drop_optimizer) by += std::string(by.empty() ? "" : " and ") + "--drop-optimizer";
  terminal.print("left out by " + by + ": " + what + "\n");
  if (first.num_of_ranks == 0) return;
  terminal.print("among them: " +
                 counted(first.num_of_ranks, "entry of a single rank", "entries of single ranks") +
                 " under a chosen name (" + printable(first.of_rank) +
                 (first.num_of_ranks > 1 ? ", …" : "") +
                 "); into one file, only a pattern with the word per_rank moves such entries\n");
}

/// Prints one line about the tensors that the cast does not change.
void print_uncast(const reshard::UncastTensors& uncast, Terminal& terminal) {
  if (uncast.count == 0) return;
  terminal.print("not cast: " + counted(uncast.count, "tensor") + " (" + printable(uncast.first) +
                 (uncast.count > 1 ? ", …)\n" : ")\n"));
}

void print_dequantized(const Dequantized& done, Terminal& terminal) {
  terminal.print(counted(done.num_weights, "quantized weight") + " became " +
                 std::string(dtype_name(done.dtype)) + "; left out " +
                 counted(done.num_companions, "tensor") + " of scales and the like\n");
}

/// Prints one line about the sources of a combination, and one about each adapter.
void print_combination(const arithmetic::CombinationCounts& counts, Terminal& terminal) {
  std::string line = "combined " + counted(counts.num_sources, "source") + ": " +
                     counted(counts.num_summed, "tensor") + " added up";
  if (counts.num_taken > 0)
    line += ", " + std::to_string(counts.num_taken) + " copied (not added up)";
  if (counts.num_sources > 1 || counts.adapters.empty()) terminal.print(line + "\n");
  for (const arithmetic::AdapterCounts& adapter : counts.adapters) {
    line = printable(adapter.path) + ": " + counted(adapter.num_changed, "tensor") + " changed";
    if (adapter.num_replaced > 0) line += ", " + std::to_string(adapter.num_replaced) + " replaced";
    if (!adapter.added_prefix.empty()) {
      line += "; names found with '" + printable(adapter.added_prefix) + "' before them";
    }
    if (!adapter.removed_prefix.empty()) {
      line += "; names found without '" + printable(adapter.removed_prefix) + "'";
    }
    terminal.print(line + "\n");
  }
}

void write_combination(const arithmetic::CombinationCounts& counts, JsonOutput& json) {
  json.key("combination").begin_object();
  json.member("sources", std::uint64_t{counts.num_sources});
  json.member("summed", std::uint64_t{counts.num_summed});
  json.member("taken", std::uint64_t{counts.num_taken});
  json.key("adapters").begin_array();
  for (const arithmetic::AdapterCounts& adapter : counts.adapters) {
    json.begin_object().member("path", adapter.path);
    json.member("changed", std::uint64_t{adapter.num_changed});
    json.member("replaced", std::uint64_t{adapter.num_replaced});
    json.member("added_prefix", adapter.added_prefix);
    json.member("removed_prefix", adapter.removed_prefix).end_object();
  }
  json.end_array().end_object();
}

std::string linked_in_words(const Outcome& outcome) {
  return ", " + exact_size(outcome.linked_nbytes) + " of them in files of the base";
}

void print_plan(const MoveOptions& options, const Outcome& outcome, Terminal& terminal) {
  const Plan& plan = outcome.plan;
  Table table({Table::Align::right, Table::Align::right, Table::Align::right});
  table.add_row({{"rank", Style::faint}, {"pieces", Style::faint}, {"bytes", Style::faint}});
  int rank = 0;
  for (const reshard::RankShare& share : reshard::rank_shares(plan)) {
    table.add_row({{std::to_string(rank++)},
                   {std::to_string(share.num_pieces)},
                   {std::to_string(share.nbytes)}});
  }
  table.print(terminal);
  terminal.print("would write " + contents_line(options, plan) +
                 (compresses(options) ? ", before compression" : "") +
                 (options.base.empty() ? "" : linked_in_words(outcome)) + "\n");
}

void print_num_left(std::size_t num_tensors, Terminal& terminal) {
  if (num_tensors == 0) return;
  terminal.print("  and " + counted(num_tensors, "more tensor") + " (--json lists all)\n");
}

/// Prints the tensors with numbers that were too large for their dtype, at most kMaxFindingsShown.
void print_overflows(const Plan& plan, const std::vector<reshard::TensorOverflow>& overflows,
                     Terminal& terminal) {
  const std::size_t num_shown = std::min(overflows.size(), kMaxFindingsShown);
  for (const reshard::TensorOverflow& overflow : std::span(overflows).first(num_shown)) {
    const TensorMeta& meta = plan.destination.tensors[overflow.tensor_index].meta;
    const std::string became = plan.on_overflow == reshard::OnOverflow::saturate ? "saturated"
                               : meta.dtype == DType::float8_e4m3fn              ? "became NaN"
                                                                    : "became infinite";
    terminal.print("  " + printable(meta.fqn) + ": " +
                   counted(static_cast<std::uint64_t>(overflow.num_elements), "element") + " " +
                   became + ", the largest was " +
                   tessera::detail::float_to_text(overflow.largest_magnitude) + "\n");
  }
  print_num_left(overflows.size() - num_shown, terminal);
}

/// Prints the tensors with numbers that became zero, at most kMaxUnderflowsShown.
void print_underflows(const Plan& plan, const std::vector<reshard::TensorUnderflow>& underflows,
                      Terminal& terminal) {
  const std::size_t num_shown = std::min(underflows.size(), kMaxUnderflowsShown);
  for (const reshard::TensorUnderflow& underflow : std::span(underflows).first(num_shown)) {
    const TensorMeta& meta = plan.destination.tensors[underflow.tensor_index].meta;
    terminal.print("  " + printable(meta.fqn) + ": " + std::to_string(underflow.num_elements) +
                   " of " + counted(static_cast<std::uint64_t>(meta.numel()), "element") +
                   " became zero\n");
  }
  print_num_left(underflows.size() - num_shown, terminal);
}

/// Returns the counts that are not 0.
std::string in_words(const CastLosses& lost) {
  const auto num_too_large = static_cast<std::uint64_t>(lost.num_too_large);
  const auto num_became_zero = static_cast<std::uint64_t>(lost.num_became_zero);
  if (num_too_large == 0) return counted(num_became_zero, "element") + " became zero";
  const std::string too_large = counted(num_too_large, "element") + " too large";
  if (num_became_zero == 0) return too_large;
  return too_large + ", " + std::to_string(num_became_zero) + " became zero";
}

/// Prints for the first tensors how many numbers were too large or became zero.
void print_losses(const Outcome& outcome, Terminal& terminal) {
  print_overflows(outcome.plan, outcome.overflows, terminal);
  print_underflows(outcome.plan, outcome.underflows, terminal);
  std::size_t num_left = outcome.losses_before_recipe.size();
  for (const auto& [name, lost] : outcome.losses_before_recipe) {
    if (outcome.losses_before_recipe.size() - num_left == kMaxUnderflowsShown) break;
    --num_left;
    terminal.print("  " + printable(name) + ", before the recipe: " + in_words(lost) + "\n");
  }
  print_num_left(num_left, terminal);
}

void print_summary(const MoveOptions& options, const Outcome& outcome,
                   std::chrono::steady_clock::time_point start, Terminal& terminal) {
  const Plan& plan = outcome.plan;
  const std::string& path = options.destination;
  std::string line = printable(path, path.size() * 4) + ": " + contents_line(options, plan);
  if (outcome.kept_nbytes > 0) {
    line += ", " + exact_size(outcome.kept_nbytes) + " of them from the interrupted run";
  }
  if (!options.base.empty()) line += linked_in_words(outcome);
  if (terminal.output_is_terminal()) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const auto rate = static_cast<double>(plan.nbytes_to_write) / std::max(seconds.count(), 1e-3);
    line += ", " + iec_size(static_cast<std::uint64_t>(rate)) + "/s";
  }
  terminal.print(line + "\n");
  print_losses(outcome, terminal);
}

/// Prints what this worker has written, and which parts are not complete yet.
void print_shares(const MoveOptions& options, const Outcome& outcome, Terminal& terminal) {
  const std::string number = std::to_string(outcome.num_shares);
  const auto say = [&](const std::string& what) {
    terminal.print(options.destination + ": " + what + "\n");
  };
  for (const auto& share : outcome.shared->shares) {
    const std::string name = "part " + std::to_string(share.index) + " of " + number;
    if (share.was_complete) {
      say(name + " was complete already");
    } else {
      say(name + ": " + exact_size(share.nbytes) +
          (share.resumed_nbytes > 0
               ? ", " + exact_size(share.resumed_nbytes) + " of them from an interrupted worker"
               : ""));
    }
  }
  const auto& missing = outcome.shared->missing;
  std::string list;
  for (const auto& share : std::span(missing).first(std::min(missing.size(), kMaxSharesShown))) {
    list += (list.empty() ? "" : ", ") + std::to_string(share.index);
  }
  if (missing.size() > kMaxSharesShown) list += ", …";
  if (!missing.empty()) {
    say(std::to_string(missing.size()) + " of " + number + " parts are not complete yet: " + list);
  }
  print_losses(outcome, terminal);
}

void write_shares(JsonOutput& json, const Outcome& outcome) {
  json.key("workers").begin_object();
  json.member("parts", outcome.num_shares);
  json.key("written").begin_array();
  for (const auto& share : outcome.shared->shares) {
    json.begin_object();
    json.member("part", share.index).member("nbytes", share.nbytes);
    json.member("kept_nbytes", share.resumed_nbytes);
    json.member("was_complete", share.was_complete).end_object();
  }
  json.end_array();
  json.key("missing").begin_array();
  for (const auto& share : outcome.shared->missing) {
    json.begin_object();
    json.member("part", share.index).member("state", share.state).end_object();
  }
  json.end_array();
  json.end_object();
}

}  // namespace

void print_json(const MoveOptions& options, const Outcome& outcome, const CheckpointReader& reader,
                Terminal& terminal) {
  const Plan& plan = outcome.plan;
  JsonOutput json(terminal, kJsonSchema);
  json.member("source_format", reader.format().name());
  json.member("format", options.format->name());
  json.member("world_size", plan.destination.world_size);
  json.member("num_tensors", std::uint64_t{plan.destination.tensors.size()});
  json.member("num_values", std::uint64_t{plan.destination.values.size()});
  json.member("num_aliases", std::uint64_t{plan.destination.aliases.size()});
  json.member("nbytes", plan.nbytes_to_write);
  json.member("kept_nbytes", outcome.kept_nbytes);
  if (!options.base.empty()) json.member("linked_nbytes", outcome.linked_nbytes);
  json.member("plan", plan_digest(plan, reader.contents()));
  json.member("written", !options.dry_run && plan.problems.empty() &&
                             (!outcome.shared || outcome.shared->is_finished));
  if (outcome.shared) write_shares(json, outcome);
  json.key("ranks").begin_array();
  int rank = 0;
  for (const reshard::RankShare& share : reshard::rank_shares(plan)) {
    json.begin_object();
    json.member("rank", rank++).member("pieces", share.num_pieces).member("nbytes", share.nbytes);
    json.end_object();
  }
  json.end_array();
  write_overflows(json, outcome);
  write_underflows(json, outcome);
  write_changes(json, plan.changes);
  json.key("left_out").begin_object();
  json.member("tensors", std::uint64_t{plan.left_out.tensors});
  json.member("values", std::uint64_t{plan.left_out.values});
  json.member("aliases", std::uint64_t{plan.left_out.aliases}).end_object();
  json.member("uncast", std::uint64_t{plan.uncast.count});
  for (const auto& [name, findings] :
       {std::pair{"problems", &plan.problems}, {"notes", &plan.notes}}) {
    json.key(name).begin_array();
    for (const Finding& finding : *findings) {
      json.begin_object();
      json.member("rule", finding.rule).member("name", finding.where.fqn);
      json.member("expected", finding.expected).member("found", finding.found);
      if (finding.remedy) json.member("remedy", command_line_remedy(finding.remedy));
      json.end_object();
    }
    json.end_array();
  }
  write_extra_files(outcome.extra_files, json);
  if (outcome.combination) write_combination(*outcome.combination, json);
  if (outcome.dequantized) {
    json.key("dequantized").begin_object();
    json.member("dtype", dtype_name(outcome.dequantized->dtype));
    json.member("weights", std::uint64_t{outcome.dequantized->num_weights});
    json.member("companions", std::uint64_t{outcome.dequantized->num_companions}).end_object();
  }
  json.finish();
}

void print_findings(const std::string& prefix, const std::vector<Finding>& findings,
                    Terminal& terminal) {
  const std::size_t num_shown = std::min(findings.size(), kMaxFindingsShown);
  for (std::size_t i = 0; i < num_shown; ++i) {
    const bool is_of_names = findings[i].rule == reshard::kModelNamesRule;
    terminal.print_error(prefix + finding_line(findings[i]) +
                         (is_of_names ? " (--rename =model. puts 'model.' before all names)" : ""));
  }
  if (num_shown == findings.size()) return;
  terminal.print_error(prefix + "and " + std::to_string(findings.size() - num_shown) +
                       " more (--json lists all)");
}

void warn_of_optimizer_keys(const std::vector<reshard::FormatChangeCount>& changes,
                            Terminal& terminal) {
  for (const auto& change : changes) {
    if (change.change != reshard::FormatChange::optimizer_keys) continue;
    terminal.print_error(
        "warning: " + change_in_words(change) +
        "; PyTorch's optimizers do not find state under text keys (--optimizer-params FILE or auto "
        "writes names instead" +
        (change.by_rename == 0 ? "; --to native, safetensors or torch keeps the numbers)" : ")"));
  }
}

void print_outcome(const MoveOptions& options, const Outcome& outcome,
                   const CheckpointReader& reader, std::chrono::steady_clock::time_point start,
                   Terminal& terminal) {
  if (options.json) return print_json(options, outcome, reader, terminal);
  if (options.quiet) return;
  if (outcome.shared) {
    print_shares(options, outcome, terminal);
    if (!outcome.shared->is_finished) return;
  }
  if (options.dry_run) {
    print_plan(options, outcome, terminal);
  } else if (outcome.shared) {
    terminal.print(options.destination + ": " + contents_line(options, outcome.plan) + ", by " +
                   counted(static_cast<std::uint64_t>(outcome.num_shares), "worker") + "\n");
  } else {
    print_summary(options, outcome, start, terminal);
  }
  if (outcome.dequantized) print_dequantized(*outcome.dequantized, terminal);
  if (outcome.combination) print_combination(*outcome.combination, terminal);
  print_left_out(options, outcome.plan.left_out, reader.contents(), terminal);
  print_uncast(outcome.plan.uncast, terminal);
  print_changes(outcome.plan.changes, terminal);
  print_extra_files(outcome.extra_files, terminal);
}

}  // namespace tessera::cli
