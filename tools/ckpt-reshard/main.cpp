#include <string>
#include <vector>

#include "ckpt-reshard/commands.h"
#include "cli/exit_code.h"
#include "cli/heap.h"
#include "cli/terminal.h"

int main(int argc, char** argv) {
  using namespace tessera::cli;
  use_one_heap_in_limited_memory();
  Terminal terminal;
  return run_tool("ckpt-reshard", terminal, [&] {
    return run_command_line(std::vector<std::string>(argv + 1, argv + argc), {}, terminal);
  });
}
