#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// Returns a size as rounded text, such as `4.0 MiB`. Below 1024 bytes the text is exact: `512
/// bytes`.
std::string iec_size(std::uint64_t nbytes);

/// Returns the last part of the text of `exact_size`: `(4.0 MiB)`. Empty below 1024 bytes.
std::string rounded_size(std::uint64_t nbytes);

/// Returns an exact and a rounded size: `4194304 bytes (4.0 MiB)`. Below 1024 bytes only the exact
/// size: `512 bytes`.
std::string exact_size(std::uint64_t nbytes);

/// Returns a count with its noun: `1 tensor`, `2 tensors`. Default plural: the noun with an `s`.
std::string counted(std::uint64_t count, std::string_view noun, std::string_view plural = {});

/// Returns the number of bytes that a text of a user means, such as `256MiB`, `1.5G`, `5GB` or
/// `4096`. Returns nothing if the text is not a size, or the size is too large. As in GNU tools,
/// `K` and `KiB` are 1024, `kB` and `KB` are 1000. Ignores case.
std::optional<std::uint64_t> parse_size(std::string_view text);

/// Returns a short text that `parse_size` reads as exactly `nbytes`: `256MiB`, `10GB`, `0`.
std::string spell_size(std::uint64_t nbytes);

}  // namespace tessera
