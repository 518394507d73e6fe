#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/layout/table_plan.h"

/// If the input is a valid plan, writing and reading it gives the same text, and it cuts a table.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const std::string_view text(reinterpret_cast<const char*>(data), nbytes);
  try {
    const TablePlan plan = TablePlan::from_json(text, "input");
    const std::string written = plan.to_json();
    if (TablePlan::from_json(written, "again").to_json() != written) std::abort();
    constexpr int kMaxWorldSize = 1024;
    if (plan.world_size > kMaxWorldSize) return 0;
    constexpr std::int64_t kShape[] = {7, 5};
    for (const auto& [name, rule] : plan.tables) {
      static_cast<void>(table_shards(rule, kShape, plan.world_size));
    }
  } catch (const Error&) {
  }
  return 0;
}
