#pragma once

#include <functional>

#include "tessera/runtime/dist/mesh.h"

namespace tessera::test {

using TransportOfRank = std::function<dist::Transport(int rank)>;

/// Runs `body` on `world_size` ranks, each a thread with a mesh of its own, over Gloo if there is
/// no `transport_of`. Ends the process with what every rank said last where they do not finish in
/// time; else rethrows what the first rank threw.
void on_ranks(int world_size, const std::function<void(const dist::Mesh&)>& body,
              dist::MeshOptions options = {}, const TransportOfRank& transport_of = {});

/// Says where this rank stands, for the message of a time-out.
void stand_at(std::string place);

/// Makes all ranks of the running `on_ranks` do what needs the global generator one after the
/// other.
void with_generator(const std::function<void()>& body);

}  // namespace tessera::test
