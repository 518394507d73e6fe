#include "ckpt-reshard/split_command.h"

#include <utility>

#include "tessera/base/file_system.h"
#include "tessera/formats/detect.h"
#include "tessera/reshard/planner.h"

namespace tessera::cli {
void add_split_command(CommandLine& line, SplitOptions& options, Terminal& terminal) {
  Command& command = line.add_command("split", "Moves a subset of a checkpoint",
                                      [&] { return run_split(options, terminal); });
  command
      .describe(
          "Moves everything under the prefixes, and removes the prefix from the names. --only "
          "moves more names; these keep their full names. --drop-optimizer alone moves everything "
          "except optimizers. Optimizer state is not under the prefix of its parameters. Add it "
          "with --only.")
      .argument("SRC", options.source, "The checkpoint to read")
      .argument("DST", options.move.destination,
                "The checkpoint to write. It must not exist, unless you give --overwrite")
      .option("--prefix", "PREFIX", options.prefixes, "Move names under PREFIX. Repeatable")
      .flag("--keep-prefix", options.keep_prefix, "Do not remove the prefix from names");
  add_flat_layout_option(command, options.move);
  add_base_option(command, options.move);
  add_move_options(command, options.move);
  command.example("split step-1000 encoder.safetensors --prefix model.encoder", "Move one module")
      .example(
          "split step-1000 encoder --prefix encoder --only optim.state.encoder "
          "--rename optim.state.encoder.=optim.state.",
          "Move one module and the optimizer state of its parameters")
      .example("split step-1000 model --drop-optimizer", "Move everything except the optimizer");
}

ExitCode run_split(const SplitOptions& options, Terminal& terminal) {
  if (options.prefixes.empty() && options.move.only.empty() && !options.move.drop_optimizer) {
    throw UsageError("split: give --prefix, --only or --drop-optimizer (at least one)",
                     "ckpt-reshard split --help");
  }
  const reshard::NamePrefixes prefixes(options.prefixes);
  MoveOptions move = options.move;
  if (!prefixes.empty()) move.only_option = move.only.empty() ? "--prefix" : "--prefix and --only";
  for (std::string& pattern : prefixes.patterns()) move.only.push_back(std::move(pattern));
  if (!options.keep_prefix) move.prefix_removals = prefixes.removals();
  const auto open = [&](const FileSystem& fs) {
    auto reader = formats::open_checkpoint(
        fs, options.source,
        {.flat_layout_path = options.move.flat_layout_path, .as_dict = options.move.as_dict});
    return MoveSource{.reader = std::move(reader), .prefixes = prefixes};
  };
  return run_move(move, {options.source}, open, terminal);
}

}  // namespace tessera::cli
