#include "ckpt-inspect/recipe_command.h"

#include "base/size_text.h"
#include "ckpt-inspect/json_members.h"
#include "cli/command_line_remedies.h"

namespace tessera::cli {
namespace {

using recipe::RecipeReport;

std::string totals_in_words(const RecipeReport& report) {
  return counted(report.num_sources, "tensor") + ": " + counted(report.num_targets, "new tensor") +
         ", " + std::to_string(report.num_kept) + " kept as they are; " +
         std::to_string(report.num_placed_elements) + " of " +
         std::to_string(report.num_source_elements) + " elements placed, " +
         std::to_string(report.num_dropped_elements) + " dropped, " +
         std::to_string(report.num_equal_elements) + " equal to other elements";
}

std::string verdict(const RecipeReport& report) {
  if (!report.problems.empty()) return counted(report.problems.size(), "problem");
  if (!report.is_invertible) return "the recipe fits, but has no inverse";
  std::string line =
      report.num_dropped_elements == 0
          ? "proved: each element is placed, and the inverse gives back the source"
          : "proved: each element that is not dropped is placed, and the inverse gives it back";
  if (report.num_equal_elements > 0) {
    line += "; " + std::to_string(report.num_equal_elements) +
            " of them must equal other elements (a move compares them)";
  }
  return line;
}

void print_text(const RecipeReport& report, Terminal& terminal) {
  const auto print = [&](const std::string& line) { terminal.print(line + "\n"); };
  for (const formats::Finding& problem : report.problems) print(finding_line(problem));
  for (const formats::Finding& note : report.notes) print("note: " + finding_line(note));
  for (const std::string& name : report.dropped) print("dropped: " + printable(name));
  for (const recipe::RuleUse& use : report.rules) {
    print("rule " + std::to_string(use.rule) + ": " + counted(use.num_sources, "source") + ", " +
          counted(use.num_targets, "target"));
  }
  print(totals_in_words(report));
  print(verdict(report));
}

void write_findings(JsonOutput& json, std::string_view key,
                    const std::vector<formats::Finding>& findings) {
  json.key(key).begin_array();
  for (const formats::Finding& finding : findings) {
    json.begin_object().member("rule", finding.rule).member("name", finding.where.fqn);
    json.member("expected", finding.expected).member("found", finding.found).end_object();
  }
  json.end_array();
}

void print_json(const RecipeReport& report, Terminal& terminal) {
  JsonOutput json(terminal, kInspectJsonSchema);
  json.member("fits", report.problems.empty()).member("invertible", report.is_invertible);
  json.member("sources", std::uint64_t{report.num_sources});
  json.member("targets", std::uint64_t{report.num_targets});
  json.member("kept", std::uint64_t{report.num_kept});
  json.member("elements", report.num_source_elements);
  json.member("placed_elements", report.num_placed_elements);
  json.member("dropped_elements", report.num_dropped_elements);
  json.member("equal_elements", report.num_equal_elements);
  json.key("rules").begin_array();
  for (const recipe::RuleUse& use : report.rules) {
    json.begin_object().member("rule", std::uint64_t{use.rule});
    json.member("sources", std::uint64_t{use.num_sources});
    json.member("targets", std::uint64_t{use.num_targets}).end_object();
  }
  json.end_array();
  json.key("dropped").begin_array();
  for (const std::string& name : report.dropped) json.value(name);
  json.end_array();
  write_findings(json, "problems", report.problems);
  write_findings(json, "notes", report.notes);
  json.finish();
}

}  // namespace

void add_recipe_command(CommandLine& line, RecipeCommandOptions& options, Terminal& terminal) {
  Command& command =
      line.add_command("recipe", "Proves a recipe on a checkpoint's names and shapes",
                       [&] { return run_recipe(options, terminal); });
  command
      .describe(
          "Applies the rules to names and shapes, without reading a tensor. Checks that each "
          "element of the source goes to one place or is dropped by a rule, and that the inverse "
          "of the recipe gives back the source. The exit code is 1 if it finds a problem.")
      .argument("ACTION", options.action, "The word check, which is the only action")
      .argument("FILE", options.source.recipe.path, "The recipe, a JSON file (docs/recipes.md)")
      .argument("SRC", options.source.path, "The checkpoint to apply the recipe to")
      .flag("--inverse", options.source.recipe.inverse,
            "Apply the recipe backwards, from its new names to the old ones")
      .option("--set", "NAME=VALUE", options.source.recipe.settings,
              "Set a variable of the recipe. prefix=TEXT puts TEXT before all names in its rules. "
              "Repeatable");
  add_flat_layout_option(command, options.source);
  add_as_dict_option(command, options.source.as_dict);
  command.flag("--json", options.json, "Print JSON")
      .example("recipe check recipes/hf-to-megatron-llama.json Llama-3.1-8B",
               "Prove a recipe before anything is written");
}

ExitCode run_recipe(const RecipeCommandOptions& options, Terminal& terminal) {
  if (options.action != "check") {
    throw UsageError("ACTION: expected 'check', found '" + printable(options.action) + "'",
                     "ckpt-inspect recipe --help");
  }
  if (options.source.recipe.path.empty()) {
    throw UsageError("FILE: expected the path of a recipe, found ''", "ckpt-inspect recipe --help");
  }
  const auto recipe = read_recipe(options.source.recipe, {options.source.path});
  SourceOptions source = options.source;
  source.recipe = {};
  const formats::CheckpointReader* reader = open_source(source, terminal);
  const RecipeReport report =
      recipe::check_recipe(recipe->recipe, reader->contents(), recipe->options);
  require_sources_unchanged();
  if (options.json) {
    print_json(report, terminal);
  } else {
    print_text(report, terminal);
  }
  return report.problems.empty() ? ExitCode::done : ExitCode::findings;
}

}  // namespace tessera::cli
