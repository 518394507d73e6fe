#include <cstdint>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/layout/table_planner.h"

/// If the input is valid notes, a plan for two tables is made with them; an Error is fine.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  std::vector<TableSize> tables(2);
  for (std::size_t t = 0; t < tables.size(); ++t) {
    tables[t].name = "t" + std::to_string(t);
    tables[t].rows = 100;
    tables[t].columns = 32;
  }
  PlannerOptions options;
  options.world_size = 4;
  options.ranks_per_host = 2;
  options.memory_per_rank_nbytes = std::uint64_t{1} << 30;
  try {
    read_table_notes(std::string_view(reinterpret_cast<const char*>(data), nbytes), "input", tables,
                     options);
    static_cast<void>(propose_plan(tables, options));
  } catch (const Error&) {
  }
  return 0;
}
