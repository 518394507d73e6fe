#include "ckpt-reshard/combine_command.h"
#include "ckpt-reshard/merge_command.h"
#include "ckpt-reshard/rebuild_index_command.h"
#include "ckpt-reshard/reshard_command.h"
#include "ckpt-reshard/split_command.h"
#include "cli/command_line.h"
#include "cli/exit_code.h"
#include "cli/format_rows.h"
#include "cli/terminal.h"

int main(int argc, char** argv) {
  using namespace tessera::cli;
  Terminal terminal;
  return run_tool("ckpt-reshard", terminal, [&] {
    CommandLine line("ckpt-reshard",
                     "Moves a checkpoint between world sizes, sharding strategies and formats",
                     terminal);
    ReshardOptions reshard;
    MergeOptions merge;
    SplitOptions split;
    CombineCommandOptions combine;
    RebuildIndexOptions rebuild_index;
    add_reshard_command(line, reshard, terminal);
    add_merge_command(line, merge, terminal);
    add_split_command(line, split, terminal);
    add_combine_command(line, combine, terminal);
    add_rebuild_index_command(line, rebuild_index, terminal);
    line.add_section("Formats", format_rows());
    return line.run(argc, argv);
  });
}
