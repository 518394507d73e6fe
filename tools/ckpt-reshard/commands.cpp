// Collects the verbs of ckpt-reshard. The help of each verb is in its own file, <verb>_command.cpp.
#include "ckpt-reshard/commands.h"

#include "ckpt-reshard/combine_command.h"
#include "ckpt-reshard/finish_command.h"
#include "ckpt-reshard/merge_command.h"
#include "ckpt-reshard/rebuild_index_command.h"
#include "ckpt-reshard/reshard_command.h"
#include "ckpt-reshard/split_command.h"
#include "cli/command_line.h"
#include "cli/format_rows.h"
#include "object_store/files.h"

namespace tessera::cli {

ExitCode run_command_line(std::vector<std::string> arguments, const std::string& finished_folder,
                          Terminal& terminal) {
  // Moves the signature of a signed URL out of the arguments, because workers record their
  // arguments in a file.
  for (std::string& argument : arguments) argument = object_store::keep_query(argument);
  CommandLine line("ckpt-reshard",
                   "Moves a checkpoint between world sizes, sharding strategies and formats",
                   terminal);
  ReshardOptions reshard;
  MergeOptions merge;
  SplitOptions split;
  CombineCommandOptions combine;
  FinishOptions finish;
  RebuildIndexOptions rebuild_index;
  for (MoveOptions* move : {&reshard.move, &merge.move, &split.move, &combine.move}) {
    move->worker.arguments = arguments;
    move->worker.finished_folder = finished_folder;
  }
  add_reshard_command(line, reshard, terminal);
  add_merge_command(line, merge, terminal);
  add_split_command(line, split, terminal);
  add_combine_command(line, combine, terminal);
  // While `finish` runs a recorded command, only the verbs that move a checkpoint are added, so
  // that the recorded command cannot run any other verb.
  if (finished_folder.empty()) {
    add_finish_command(line, finish, terminal);
    add_rebuild_index_command(line, rebuild_index, terminal);
  }
  line.add_section("Formats", format_rows());
  std::vector<const char*> argv{"ckpt-reshard"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  return line.run(static_cast<int>(argv.size()), argv.data());
}

}  // namespace tessera::cli
