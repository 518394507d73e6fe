#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// Returns `4.0 MiB`; below 1024, `512 bytes`.
std::string iec_size(std::uint64_t nbytes);

/// Returns what `exact_size` puts behind the bytes: `(4.0 MiB)`; below 1024, nothing.
std::string rounded_size(std::uint64_t nbytes);

/// Returns `4194304 bytes (4.0 MiB)`; below 1024, `512 bytes`.
std::string exact_size(std::uint64_t nbytes);

/// Returns `1 tensor`, `2 tensors`; the plural is the noun with an `s` unless one is given.
std::string counted(std::uint64_t count, std::string_view noun, std::string_view plural = {});

/// Returns the bytes that a user's `256MiB`, `1.5G`, `5GB` or `4096` stand for, or nothing where
/// it is not a size. As in GNU tools, `K`, `KiB` are 1024 and `kB`, `KB` are 1000; case of the
/// letters aside.
std::optional<std::uint64_t> parse_size(std::string_view text);

}  // namespace tessera
