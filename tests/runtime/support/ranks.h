#pragma once

#include <functional>

#include "tessera/runtime/dist/mesh.h"

namespace tessera::test {

using TransportOfRank = std::function<dist::Transport(int rank)>;

/// Runs `body` on `world_size` ranks. Each rank is a thread with its own mesh. The ranks
/// communicate through `transport_of(rank)`, by default Gloo. Rethrows the error of the lowest rank
/// that threw. If the ranks do not finish in time, prints the last `stand_at` of each rank and ends
/// the process.
void on_ranks(int world_size, const std::function<void(const dist::Mesh&)>& body,
              dist::MeshOptions options = {}, const TransportOfRank& transport_of = {});

/// Records what this rank is about to do. `on_ranks` prints it if the ranks do not finish in time.
void stand_at(std::string place);

/// Runs `body` while no other thread is in `with_generator`. Use it for code that seeds or uses the
/// default random number generator, which ranks that are threads share.
void with_generator(const std::function<void()>& body);

}  // namespace tessera::test
