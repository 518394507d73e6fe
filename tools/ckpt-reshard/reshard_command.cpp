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
          "The format of SRC is detected. Bytes are streamed in bounded memory and checked against "
          "their checksums on the way; DST appears whole or not at all.")
      .describe(
          "A run that is killed, interrupted or out of disk keeps what it has finished, as "
          "DST.partial, for another one to go on with: --resume.")
      .describe(
          "Without --world-size, --strategy and --plan the pieces stay as they are. --world-size "
          "alone means --strategy dim0.")
      .argument("SRC", options.source,
                "The checkpoint to read: native, safetensors, DCP or torch.save")
      .argument("DST", options.move.destination, "The checkpoint to write; must not exist");
  add_flat_layout_option(command, options.move);
  add_move_options(command, options.move);
  options.move.progress.verb = "reshard";  // the tool without a verb
  command
      .example("step-1000 step-1000.8 --world-size 8", "For eight ranks, cut by rows as FSDP2 does")
      .example("step-1000 model.safetensors --only 'model.*'", "The model alone")
      .example("step-1000 dcp --to dcp --world-size 2", "For PyTorch's distributed checkpoint");
}

ExitCode run_reshard(const ReshardOptions& options, Terminal& terminal) {
  const auto open = [&] {
    return MoveSource{formats::open_checkpoint(
        FileSystem::posix(), options.source, {.flat_layout_path = options.move.flat_layout_path})};
  };
  return run_move(options.move, {options.source}, open, terminal);
}

}  // namespace tessera::cli
