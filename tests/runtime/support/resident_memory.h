#pragma once

#include <cstdint>
#include <functional>

namespace tessera::test {

/// Returns by how much this process's resident memory grows at most while `body` runs, whatever
/// allocates it. Give freed memory back at once before (`give_back_freed_memory`), and run alone in
/// the process. Units: bytes.
std::int64_t peak_growth(const std::function<void()>& body);

/// Makes malloc map each large block by itself from now on, so that what is freed counts no more.
void give_back_freed_memory();

}  // namespace tessera::test
