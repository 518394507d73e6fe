#pragma once

#include <cstdint>
#include <string_view>

#include "inspect/pickle_scan/pickle_scan.h"
#include "inspect/pickle_scan/pickle_walk.h"

namespace tessera::inspect {

struct Judgement {
  Verdict verdict = Verdict::opaque;
  std::string_view reason{};  // why the name is dangerous, in a few words; a string constant
};

/// Returns the verdict of a name, judged only by its text. Imports nothing. [Note: Verdicts]
///
/// - In the standard library only the listed names are plain. Every other name there is dangerous,
///   because no list of dangerous names was ever complete.
/// - In torch and NumPy, listed names are known or plain. Modules and functions that run code are
///   dangerous; other names are opaque.
/// - Packages that exist to run code or to load files are dangerous.
/// - A dotted name is dangerous if one of its steps (components) leads to a module that runs code,
///   is private to Python (`__globals__`), or is not spelled like a class: `cProfile.run`. In torch
///   and NumPy the last step too must be a class or a constant.
Judgement judge(std::string_view module, std::string_view name);

/// Says whether the text is an identifier, or several with dots between them.
bool is_identifier_path(std::string_view path);

/// Says which of its first two arguments a known or plain function calls: the first if bit 0 is
/// set, the second if bit 1 is set.
std::uint64_t called_arguments(std::string_view module, std::string_view name);

/// Returns the verdict of a global of a pickle, from its name and from what the pickle does with
/// it.
Judgement judge(const WalkedGlobal& global);

}  // namespace tessera::inspect
