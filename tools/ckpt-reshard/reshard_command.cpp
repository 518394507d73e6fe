#include "ckpt-reshard/reshard_command.h"

#include "tessera/base/file_system.h"
#include "tessera/formats/detect.h"

namespace tessera::cli {

void add_reshard_command(CommandLine& line, ReshardOptions& options, Terminal& terminal) {
  Command& command = line.add_command(
      "", "Moves a checkpoint between world sizes, sharding strategies and formats",
      [&] { return run_reshard(options, terminal); });
  command
      .describe(
          "The tool detects the format of SRC. It copies the bytes in bounded memory and checks "
          "them against their checksums. DST appears only when it is complete.")
      .describe(
          "An interrupted run (killed, Ctrl-C, disk full) keeps its finished work as DST.partial. "
          "--resume continues it.")
      .describe(
          "Without --world-size, --strategy, --mesh, --like and --plan, tensors keep the pieces "
          "that they have in SRC. --world-size alone means --strategy dim0.")
      .argument("SRC", options.source, "The checkpoint to read, of any format that this help lists")
      .argument("DST", options.move.destination,
                "The checkpoint to write. It must not exist, unless you give --overwrite");
  add_flat_layout_option(command, options.move);
  add_base_option(command, options.move);
  add_move_options(command, options.move);
  options.move.progress.verb = "reshard";  // the tool without a verb
  command
      .example("step-1000 step-1000.8 --world-size 8",
               "Write for eight ranks, and cut tensors by rows as FSDP2 does")
      .example("step-1000 model.safetensors --only 'model.*'", "Write only the model")
      .example("step-1000 step-1000.dcp --to dcp --world-size 2",
               "Convert to PyTorch's distributed checkpoint (DCP), for two ranks");
}

ExitCode run_reshard(const ReshardOptions& options, Terminal& terminal) {
  const auto open = [&](const FileSystem& fs) {
    return MoveSource{formats::open_checkpoint(
        fs, options.source,
        {.flat_layout_path = options.move.flat_layout_path, .as_dict = options.move.as_dict})};
  };
  return run_move(options.move, {options.source}, open, terminal);
}

}  // namespace tessera::cli
