#pragma once

#include "support/memory_checkpoint.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"

namespace tessera::test {

/// Plans a move and moves the checkpoint in memory, block by block. `plan.problems` must be
/// empty.
inline MemoryCheckpoint reshard_in_memory(const formats::CheckpointReader& source,
                                          const reshard::PlanOptions& options, int num_threads = 1,
                                          std::uint64_t block_nbytes = 64) {
  const reshard::Plan plan = reshard::plan_reshard(source.contents(), source.path(), options);
  for (const formats::Finding& problem : plan.problems) {
    throw std::runtime_error(problem.where.fqn + ": " + problem.rule + ": expected " +
                             problem.expected + ", found " + problem.found);
  }
  std::vector<Value> values;
  for (const std::size_t i : plan.value_sources) values.push_back(source.read_value(i));
  MemoryWriter writer(plan.destination, values, block_nbytes);
  reshard::execute(plan, source, writer, {.num_threads = num_threads});
  writer.commit();
  return writer.result();
}

/// Returns bytes that differ from place to place.
inline Bytes counting_bytes(std::size_t nbytes, unsigned seed = 1) {
  Bytes bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) {
    bytes[i] = static_cast<std::byte>((i * 131 + (i >> 8) * 17 + seed * 29) & 0xFFU);
  }
  return bytes;
}

}  // namespace tessera::test
