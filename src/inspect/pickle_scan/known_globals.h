#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace tessera::inspect {

/// Names of one module, separated by spaces.
struct NamesOfModule {
  std::string_view module;
  std::string_view names;
};

/// Functions that call some of their first two arguments.
struct CallingFunctions {
  NamesOfModule names;
  std::uint64_t called;  // bit 0: the first argument, bit 1: the second one
};

// [Note: Name tables] Modules and names as Python 3 spells them. A module also stands for its
// submodules, if the comment of its list says so.

/// The names that `torch.load(weights_only=True)` allows, and the classes of DCP's metadata.
std::span<const NamesOfModule> known_names();
/// Classes and functions of the standard library, NumPy and torch that only make data and run
/// nothing else.
std::span<const NamesOfModule> plain_names();
/// Those among the known and plain names that call an argument.
std::span<const CallingFunctions> calling_functions();
/// Names outside of the standard library that run code or load files.
std::span<const NamesOfModule> dangerous_names();
/// Modules and packages, with their submodules, that exist to run code, load files or reach other
/// machines.
std::string_view dangerous_modules();
/// The modules of the standard library from Python 2.7 to 3.15, without submodules.
std::string_view standard_modules();
/// Modules that run code or reach the system. A dotted name is dangerous if any of its steps is one
/// of these.
std::string_view powerful_modules();
/// Functions that run code, whatever module they are imported from.
std::string_view powerful_functions();
/// Names of functions and methods that load or write data, or call a function that they get as an
/// argument. They are dangerous in every module of torch and NumPy.
std::string_view powerful_functions_of_torch_and_numpy();

}  // namespace tessera::inspect
