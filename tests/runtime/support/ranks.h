#pragma once

#include <functional>

#include "tessera/runtime/dist/mesh.h"

namespace tessera::test {

/// Runs `body` on `world_size` ranks, each a thread with a mesh over Gloo of its own. Ends the
/// process with what every rank said last where they do not finish in time; else rethrows what the
/// first rank threw.
void on_ranks(int world_size, const std::function<void(const dist::Mesh&)>& body,
              dist::MeshOptions options = {});

/// Says where this rank stands, for the message of a time-out.
void stand_at(std::string place);

/// Makes all ranks of the running `on_ranks` do what needs the global generator one after the
/// other.
void with_generator(const std::function<void()>& body);

}  // namespace tessera::test
