#include "ckpt-reshard/combine_command.h"

#include <charconv>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "arithmetic/tied_embeddings.h"
#include "base/float_text.h"
#include "ckpt-reshard/dequantize_option.h"
#include "object_store/files.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/detect.h"

namespace tessera::cli {
namespace {

using arithmetic::Accumulation;
using arithmetic::Step;
using formats::MergePreference;

constexpr const char* kHelp = "ckpt-reshard combine --help";

struct SourceStep {
  std::string path;
  Step step{};
};

struct ScaledAdapter {
  std::string path;
  double scale = 1.0;
};

/// The sum that the options describe.
struct Formula {
  std::vector<SourceStep> sources;
  double divisor = 1.0;
  std::vector<ScaledAdapter> adapters;
};

[[noreturn]] void refuse(const std::string& option, const std::string& expected,
                         const std::string& found) {
  throw UsageError(option + ": expected " + expected + ", found " + found, kHelp);
}

std::optional<double> parse_number(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  double number = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool is_whole = error == std::errc() && end == text.data() + text.size();
  return is_whole && std::isfinite(number) ? std::optional(number) : std::nullopt;
}

SourceStep parse_linear(const std::string& text) {
  const std::size_t equals = text.find('=');
  const auto weight =
      equals == std::string::npos ? std::nullopt : parse_number(text.substr(0, equals));
  if (!weight || equals + 1 == text.size()) {
    refuse("--linear", "WEIGHT=SRC, such as 0.5=step-1000", "'" + printable(text) + "'");
  }
  return {text.substr(equals + 1), {.weight = *weight}};
}

/// Parses `ADAPTER` or `ADAPTER=SCALE`. For an adapter with the path `a=2`, the user must also give
/// the scale: `a=2=1`.
ScaledAdapter parse_adapter(const std::string& text) {
  const std::size_t equals = text.rfind('=');
  const auto scale =
      equals == std::string::npos ? std::nullopt : parse_number(text.substr(equals + 1));
  if (!scale) return {text};
  return {text.substr(0, equals), *scale};
}

/// Returns the sum of --average or --ema.
Formula formula_of_series(const CombineCommandOptions& options) {
  if (options.averages && options.ema_decay) refuse("--ema", "either --average or --ema", "both");
  if (options.sources.size() < 2) {
    refuse(options.averages ? "--average" : "--ema", "two or more SRC after DST",
           std::to_string(options.sources.size()));
  }
  Formula formula;
  for (const std::string& path : options.sources) formula.sources.push_back({path});
  if (options.averages) {
    formula.divisor = static_cast<double>(options.sources.size());
    return formula;
  }
  const double decay = *options.ema_decay;
  if (!(decay >= 0.0 && decay <= 1.0)) {
    refuse("--ema", "a decay from 0 to 1", tessera::detail::float_to_text(decay));
  }
  for (std::size_t i = 1; i < formula.sources.size(); ++i) {
    formula.sources[i].step = {.keep = decay, .weight = 1.0 - decay};
  }
  return formula;
}

/// Returns the sum of --base, --linear and --subtract, in this order.
Formula formula_of_terms(const CombineCommandOptions& options) {
  if (!options.sources.empty()) {
    refuse("SRC", "--average or --ema with it",
           "'" + printable(options.sources.front()) + "' without these options");
  }
  Formula formula;
  double sum = 0.0;
  double sum_of_magnitudes = 0.0;
  const auto add = [&](SourceStep source) {
    sum += source.step.weight;
    sum_of_magnitudes += std::fabs(source.step.weight);
    formula.sources.push_back(std::move(source));
  };
  if (!options.base.empty()) add({options.base});
  for (const std::string& text : options.linear) add(parse_linear(text));
  for (const std::string& path : options.subtracted) add({path, {.weight = -1.0}});
  if (formula.sources.empty()) {
    throw UsageError("combine: expected --linear, --base, --average or --ema, found none of them",
                     kHelp);
  }
  if (!options.normalizes) return formula;
  // A sum below this share of its terms counts as 0: 0.1 + 0.2 - 0.3 is 0, but rounding leaves a
  // small number.
  constexpr double kCancelled = 1e-12;
  if (std::isfinite(sum) && std::fabs(sum) <= kCancelled * sum_of_magnitudes) {
    refuse("--normalize", "weights whose sum is not 0",
           sum == 0.0 ? "0"
                      : tessera::detail::float_to_text(sum) + ", which is 0 apart from rounding");
  }
  formula.divisor = sum;
  return formula;
}

/// Throws if the dtype of the sums would make a weight, a decay or the weights' sum infinite or 0.
void check_weights(const Formula& formula, const CombineCommandOptions& options) {
  const auto check = [&](const std::string& option, const std::string& what, double number) {
    if (arithmetic::can_hold(options.accumulation, number)) return;
    const bool is_double = options.accumulation == Accumulation::float64;
    refuse(option, what + " that " + (is_double ? "float64" : "float32") + " can hold",
           tessera::detail::float_to_text(number));
  };
  for (const SourceStep& source : formula.sources) {
    const std::string option = options.ema_decay ? "--ema" : "--linear";
    check(option, options.ema_decay ? "a decay" : "a weight", source.step.weight);
    check(option, "a decay", source.step.keep);
  }
  check("--normalize", "weights with a sum", formula.divisor);
}

Formula formula_of(const CombineCommandOptions& options) {
  const bool is_series = options.averages || options.ema_decay;
  const bool has_terms =
      !options.base.empty() || !options.linear.empty() || !options.subtracted.empty();
  if (is_series && (has_terms || options.normalizes)) {
    refuse(options.averages ? "--average" : "--ema",
           "no --base, --linear, --subtract or --normalize with it", "one of these options");
  }
  Formula formula = is_series ? formula_of_series(options) : formula_of_terms(options);
  for (const std::string& text : options.adapters) {
    formula.adapters.push_back(parse_adapter(text));
  }
  check_weights(formula, options);
  return formula;
}

/// Throws if the destination is one of the sources, because the sum would replace its own source.
void require_other_destination(const std::vector<std::string>& sources,
                               const std::string& destination) {
  const auto without_slashes = [](std::string_view path) {
    return path.substr(0, path.find_last_not_of('/') + 1);
  };
  for (const std::string& source : sources) {
    std::error_code ignored;
    if (!std::filesystem::equivalent(source, destination, ignored) &&
        without_slashes(source) != without_slashes(destination)) {
      continue;
    }
    throw Error::expected(ErrorKind::invalid_argument, {.path = destination}, "destination",
                          "a path that is not a source", "the path of a source",
                          "write to another path, then rename it");
  }
}

/// Returns a text with everything that the result's numbers depend on, except the sources' bytes.
/// `--resume` compares this text with that of the interrupted run.
std::string identity_of(const Formula& formula, const CombineCommandOptions& options) {
  using tessera::detail::float_to_text;
  std::string text;
  for (const SourceStep& source : formula.sources) {
    text += float_to_text(source.step.keep) + "*sum+" + float_to_text(source.step.weight) + "*" +
            source.path + " ";
    const std::string quantization =
        dequantize_identity(object_store::files(), {source.path}, options.move);
    if (!quantization.empty()) text += quantization + " ";
  }
  text += "/" + float_to_text(formula.divisor);
  for (const ScaledAdapter& adapter : formula.adapters) {
    text += " lora " + float_to_text(adapter.scale) + "*" + adapter.path + " " +
            arithmetic::adapter_config_digest(object_store::files(), adapter.path);
  }
  const bool is_double = options.accumulation == Accumulation::float64;
  return text + (is_double ? " in float64" : " in float32");
}

arithmetic::CombineOptions combine_options(const Formula& formula,
                                           const CombineCommandOptions& options) {
  arithmetic::CombineOptions combine;
  combine.divisor = formula.divisor;
  combine.accumulation = options.accumulation;
  // A recipe or --optimizer-params gives other names, of which a cast may change other tensors.
  const bool keeps_names =
      options.move.recipe.path.empty() && options.move.optimizer_params.empty();
  if (!options.move.cast.empty() && keeps_names) combine.rounding = arithmetic::Rounding::later;
  combine.on_overflow = options.move.on_overflow;
  combine.preference = options.preference;
  combine.selection.only = NameSelection(options.move.only);
  if (options.move.drop_optimizer) {
    combine.selection.optimizer = reshard::OptimizerSelection::leave_out;
  }
  return combine;
}

MoveSource open_combined(const FileSystem& fs, const Formula& formula,
                         const CombineCommandOptions& options) {
  std::vector<formats::Finding> problems;
  std::optional<Dequantized> dequantized;
  const auto losses = std::make_shared<arithmetic::RoundingLosses>();
  std::vector<arithmetic::WeightedReader> sources;
  for (const SourceStep& source : formula.sources) {
    auto reader = formats::open_checkpoint(fs, source.path, {.as_dict = options.move.as_dict});
    const formats::CheckpointReader* const opened = reader.get();
    reader = apply_dequantize(std::move(reader), fs, {source.path}, options.move, problems,
                              dequantized, losses);
    const bool is_as_stored = reader.get() == opened;
    sources.push_back({std::move(reader), source.step,
                       is_as_stored ? quantization_method(fs, source.path, options.move) : ""});
  }
  std::vector<arithmetic::LoraAdapter> adapters;
  for (const ScaledAdapter& adapter : formula.adapters) {
    adapters.push_back(arithmetic::open_lora_adapter(fs, adapter.path, adapter.scale));
  }
  arithmetic::CombineOptions combine = combine_options(formula, options);
  combine.losses = losses;
  if (!formula.adapters.empty()) {
    const std::string& folder = options.move.extra_files_folder;
    combine.has_tied_embeddings =
        arithmetic::says_tied_embeddings(fs, folder.empty() ? formula.sources[0].path : folder);
  }
  auto combined = arithmetic::combine_checkpoints(std::move(sources), std::move(adapters), combine);
  if (problems.empty()) problems = std::move(combined.problems);
  return MoveSource{.reader = std::move(combined.reader),
                    .problems = std::move(problems),
                    .combination = std::move(combined.counts),
                    .widened = std::move(combined.widened),
                    .dequantized = dequantized,
                    .losses = losses};
}

void add_terms(Command& command, CombineCommandOptions& options) {
  command
      .option("--linear", "WEIGHT=SRC", options.linear,
              "Add WEIGHT times the tensors of SRC. Repeatable")
      .option("--base", "SRC", options.base, "The same as --linear 1=SRC, before all others")
      .option("--subtract", "SRC", options.subtracted,
              "The same as --linear -1=SRC, after all others. Repeatable")
      .option("--lora", "ADAPTER[=SCALE]", options.adapters,
              "Add a LoRA adapter (a folder that PEFT wrote), multiplied by SCALE (default: 1). "
              "Repeatable")
      .flag("--average", options.averages, "Write the mean of all SRC")
      .option("--ema", "DECAY", options.ema_decay,
              "Write the exponential moving average of all SRC, oldest first: "
              "DECAY * average + (1 - DECAY) * SRC")
      .flag("--normalize", options.normalizes, "Divide the sum by the sum of all weights")
      .choice(
          "--accumulate", {"float64", "float32"},
          [&](const std::string& name) {
            options.accumulation =
                name == "float64" ? Accumulation::float64 : Accumulation::float32;
          },
          "The dtype in which sums are computed (default: float64)")
      .choice(
          "--prefer", {"first", "last"},
          [&](const std::string& which) {
            options.preference = which == "first" ? MergePreference::first : MergePreference::last;
          },
          "If values, integers or the state of a trainer differ between sources, take them from "
          "the first or the last");
}

}  // namespace

void add_combine_command(CommandLine& line, CombineCommandOptions& options, Terminal& terminal) {
  Command& command = line.add_command("combine", "Adds up the tensors of several checkpoints",
                                      [&] { return run_combine(options, terminal); });
  command
      .describe(
          "Writes a weighted sum, a mean or a moving average of checkpoints, or a model with LoRA "
          "adapters merged into it. Sources may have any format and sharding. DST has the names, "
          "dtypes, pieces and extra files of the first source.")
      .describe(
          "Sums are computed in float64 (or as --accumulate says) and rounded once. All sources "
          "must have the same names and shapes. Optimizer state has no sum; --drop-optimizer "
          "leaves it out.")
      .argument("DST", options.move.destination,
                "The checkpoint to write. It must not exist, unless you give --overwrite")
      .arguments("SRC...", options.sources, "The checkpoints of --average and --ema");
  add_terms(command, options);
  add_move_options(command, options.move);
  command
      .example("combine merged --linear 0.5=step-1000 --linear 0.5=step-2000",
               "Write the mean of two checkpoints")
      .example("combine merged --base model --lora adapter",
               "Merge a LoRA adapter into its base model")
      .example("combine task --linear 1=finetuned --subtract model",
               "Write what fine-tuning has changed (a task vector)")
      .example("combine ema --ema 0.99 step-1000 step-2000 step-3000 --drop-optimizer",
               "Write the moving average of a run's models");
}

ExitCode run_combine(const CombineCommandOptions& options, Terminal& terminal) {
  const Formula formula = formula_of(options);
  std::vector<std::string> paths;
  for (const SourceStep& source : formula.sources) paths.push_back(source.path);
  for (const ScaledAdapter& adapter : formula.adapters) paths.push_back(adapter.path);
  require_other_destination(paths, options.move.destination);
  MoveOptions move = options.move;
  move.preference = options.preference;
  move.combination = identity_of(formula, options);
  const auto open = [&](const FileSystem& fs) { return open_combined(fs, formula, options); };
  return run_move(move, paths, open, terminal);
}

}  // namespace tessera::cli
