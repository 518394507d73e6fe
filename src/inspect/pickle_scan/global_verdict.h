#pragma once

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
/// - A dotted name is dangerous if one of its steps leads to such a module, is private to Python
///   (`__globals__`), or is not spelled like a class: `cProfile.run`. In torch and NumPy the last
///   step too must be a class or a constant.
Judgement judge(std::string_view module, std::string_view name);

/// Returns the verdict of a global of a pickle, from its name and from what the pickle does with
/// it.
Judgement judge(const WalkedGlobal& global);

}  // namespace tessera::inspect
