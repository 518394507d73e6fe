#include "ckpt-reshard/split_command.h"

#include <utility>

#include "tessera/base/file_system.h"
#include "tessera/formats/detect.h"
#include "tessera/reshard/planner.h"

namespace tessera::cli {
void add_split_command(CommandLine& line, SplitOptions& options, Terminal& terminal) {
  Command& command = line.add_command("split", "Moves a part of a checkpoint",
                                      [&] { return run_split(options, terminal); });
  command
      .describe(
          "The part is what lies under the prefixes, which names lose, and what --only adds under "
          "its own names; --drop-optimizer alone takes all but optimizers. The state of optimizers "
          "does not lie under its parameters' prefixes, so it is named apart.")
      .argument("SRC", options.source, "The checkpoint to read")
      .argument("DST", options.move.destination, "The checkpoint to write; must not exist")
      .option("--prefix", "PREFIX", options.prefixes, "Move names under it; repeatable")
      .flag("--keep-prefix", options.keep_prefix, "Leave names as they are");
  add_flat_layout_option(command, options.move);
  add_move_options(command, options.move);
  command.example("split step-1000 encoder.safetensors --prefix model.encoder", "One module")
      .example(
          "split step-1000 encoder --prefix encoder --only optim.state.encoder "
          "--rename optim.state.encoder.=optim.state.",
          "With the state of its parameters")
      .example("split step-1000 model --drop-optimizer", "All but the optimizer");
}

ExitCode run_split(const SplitOptions& options, Terminal& terminal) {
  if (options.prefixes.empty() && options.move.only.empty() && !options.move.drop_optimizer) {
    throw UsageError("split: one of --prefix, --only and --drop-optimizer is missing",
                     "ckpt-reshard split --help");
  }
  const reshard::NamePrefixes prefixes(options.prefixes);
  MoveOptions move = options.move;
  for (std::string& pattern : prefixes.patterns()) move.only.push_back(std::move(pattern));
  if (!options.keep_prefix) move.prefix_removals = prefixes.removals();
  const auto open = [&] {
    MoveSource source{formats::open_checkpoint(
        FileSystem::posix(), options.source, {.flat_layout_path = options.move.flat_layout_path})};
    prefixes.check_used(source.reader->contents(), "--prefix");
    return source;
  };
  return run_move(move, {options.source}, open, terminal);
}

}  // namespace tessera::cli
