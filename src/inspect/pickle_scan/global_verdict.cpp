#include "inspect/pickle_scan/global_verdict.h"

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "inspect/pickle_scan/known_globals.h"

namespace tessera::inspect {
namespace {

template <class Use>
void for_each_part(std::string_view text, char separator, const Use& use) {
  while (!text.empty()) {
    const std::size_t end = text.find(separator);
    use(text.substr(0, end));
    if (end == std::string_view::npos) return;
    text.remove_prefix(end + 1);
  }
}

template <class Holds>
bool any_step(std::string_view path, const Holds& holds) {
  bool found = false;
  for_each_part(path, '.', [&](std::string_view step) { found = found || holds(step); });
  return found;
}

std::string_view first_step(std::string_view path) {
  return path.substr(0, path.find('.'));
}

std::string joined(std::string_view module, std::string_view name) {
  return std::string(module) + "." + std::string(name);
}

using Words = std::unordered_set<std::string>;

Words words_of(std::string_view text) {
  Words words;
  for_each_part(text, ' ', [&](std::string_view word) { words.emplace(word); });
  return words;
}

/// The name tables, ready to be searched. [Note: Name tables]
struct Tables {
  std::unordered_map<std::string, Verdict> harmless;  // the key is `module.name`
  Words dangerous = words_of(dangerous_modules());    // modules, which include their submodules
  Words standard = words_of(standard_modules());
  Words powerful_modules = words_of(inspect::powerful_modules());
  Words powerful_functions = words_of(inspect::powerful_functions());
  Words powerful_in_torch = words_of(inspect::powerful_functions_of_torch_and_numpy());

  Tables() {
    add(plain_names(), Verdict::plain);
    add(known_names(), Verdict::known);
    for (const NamesOfModule& of : dangerous_names()) {
      for_each_part(of.names, ' ',
                    [&](std::string_view name) { dangerous.insert(joined(of.module, name)); });
    }
  }

 private:
  void add(std::span<const NamesOfModule> table, Verdict verdict) {
    for (const NamesOfModule& of : table) {
      for_each_part(of.names, ' ', [&](std::string_view name) {
        harmless.insert_or_assign(joined(of.module, name), verdict);
      });
    }
  }
};

const Tables& tables() {
  static const Tables kTables;
  return kTables;
}

/// Returns the Python 3 name of a module: pickles of protocol 2 and below call some modules by
/// their Python 2 names.
std::string_view python3_module(std::string_view module) {
  if (module == "__builtin__" || module == "exceptions") return "builtins";
  return module == "copy_reg" ? "copyreg" : module;
}

bool is_constant_name(std::string_view step) {
  constexpr std::string_view kAllowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
  return !step.empty() && step[0] >= 'A' && step[0] <= 'Z' &&
         step.find_first_not_of(kAllowed) == std::string_view::npos;
}

/// Returns the verdict of a listed name, or of a constant of a listed class (`Enum.MEMBER`).
std::optional<Verdict> listed(const std::string& path, std::string_view name) {
  const auto& harmless = tables().harmless;
  if (const auto found = harmless.find(path); found != harmless.end()) return found->second;
  const std::size_t dot = name.find('.');
  if (dot == std::string_view::npos || !is_constant_name(name.substr(dot + 1))) return std::nullopt;
  const auto found = harmless.find(path.substr(0, path.size() - (name.size() - dot)));
  if (found == harmless.end()) return std::nullopt;
  return found->second;
}

bool is_within_dangerous(const std::string& path) {
  for (std::size_t end = path.find('.');; end = path.find('.', end + 1)) {
    if (tables().dangerous.contains(path.substr(0, end))) return true;
    if (end == std::string::npos) return false;
  }
}

/// Says whether the name is spelled like a class or a constant: `Shard`, `_StridedShard`, `MAX`.
bool is_class_name(std::string_view step) {
  step.remove_prefix(std::min(step.find_first_not_of('_'), step.size()));
  return !step.empty() && step[0] >= 'A' && step[0] <= 'Z';
}

bool is_torch_or_numpy(std::string_view module) {
  return first_step(module) == "torch" || first_step(module) == "numpy";
}

/// Says whether the name is a function of tensors that a model can have as its activation:
/// `torch.relu` is pickled as `_VariableFunctionsClass.relu`.
bool is_function_of_tensors(std::string_view module, std::string_view name) {
  return module == "torch._C" && std::ranges::count(name, '.') == 1 &&
         (first_step(name) == "_VariableFunctionsClass" || first_step(name) == "TensorBase" ||
          first_step(name) == "_TensorBase");
}

/// Says whether a name with dots goes through something other than a class, such as the module that
/// `cProfile.run` goes through. In torch and NumPy, methods count too: their modules import classes
/// of the standard library, such as `Path`. Members of enumerations do not count. Text that is no
/// name does not count either: bytes of tensors can look like an import.
bool goes_through_a_module(std::string_view module, std::string_view name) {
  const std::size_t last_dot = name.rfind('.');
  if (last_dot == std::string_view::npos) return false;
  if (!is_identifier_path(module) || !is_identifier_path(name)) return false;
  if (is_function_of_tensors(module, name)) return false;
  const std::string_view last = name.substr(last_dot + 1);
  const auto is_other = [](std::string_view step) { return !is_class_name(step); };
  if (is_torch_or_numpy(module)) return any_step(name, is_other);
  return any_step(name.substr(0, last_dot), is_other) && !is_constant_name(last);
}

/// Says whether the name is a method of a class that works on files, whatever module imported it.
bool is_method_of_path(std::string_view name) {
  const std::size_t dot = name.find('.');
  if (dot == std::string_view::npos || is_constant_name(name.substr(dot + 1))) return false;
  const std::string_view first = name.substr(0, dot);
  return first == "Path" || first == "PosixPath" || first == "WindowsPath";
}

/// Says whether the module is one of those with which Python tests itself: some of them run code.
/// Each Python version has others.
bool is_test_module(std::string_view module) {
  return module.starts_with("_test") || module.starts_with("_xx");
}

bool is_private_to_python(std::string_view step) {
  return step.size() > 4 && step.starts_with("__") && step.ends_with("__");
}

bool makes_a_plain_class(const WalkedGlobal& global) {
  return global.module == "collections" && global.name == "namedtuple";
}

}  // namespace

std::string_view to_string(Verdict verdict) {
  switch (verdict) {
    case Verdict::known:
      return "known";
    case Verdict::plain:
      return "plain";
    case Verdict::opaque:
      return "opaque";
    case Verdict::dangerous:
      return "dangerous";
  }
  return "dangerous";
}

Judgement judge(std::string_view module_of_any_python, std::string_view name) {
  const std::string_view module = python3_module(module_of_any_python);
  const std::string path = joined(module, name);
  const auto in = [](const Words& words) {
    return [&words](std::string_view step) { return words.contains(std::string(step)); };
  };
  if (const auto verdict = listed(path, name)) return {*verdict};
  if (in(tables().standard)(first_step(module)) || is_test_module(module)) {
    return {Verdict::dangerous, "in the standard library, but not on the list of harmless names"};
  }
  if (any_step(path, in(tables().powerful_modules))) {
    return {Verdict::dangerous, "leads to a module that can run code"};
  }
  if (any_step(name, in(tables().powerful_functions))) {
    return {Verdict::dangerous, "has the name of a function that runs code"};
  }
  if (any_step(name, is_private_to_python)) {
    return {Verdict::dangerous, "leads into the inside of a module or class"};
  }
  if (is_within_dangerous(path)) {
    return {Verdict::dangerous,
            "of a module that runs code, loads files or reaches other machines"};
  }
  if (is_torch_or_numpy(module) && any_step(name, in(tables().powerful_in_torch))) {
    return {Verdict::dangerous, "loads, writes or calls what it is given"};
  }
  if (goes_through_a_module(module, name) || is_method_of_path(name)) {
    return {Verdict::dangerous, "reaches through attributes to what is not a class or a constant"};
  }
  return {Verdict::opaque};
}

bool is_identifier_path(std::string_view path) {
  constexpr std::string_view kAllowed =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.";
  return path.find_first_not_of(kAllowed) == std::string_view::npos;
}

std::uint64_t called_arguments(std::string_view module, std::string_view name) {
  module = python3_module(module);
  std::uint64_t called = 0;
  for (const CallingFunctions& functions : calling_functions()) {
    if (functions.names.module != module) continue;
    for_each_part(functions.names.names, ' ', [&](std::string_view each) {
      if (each == name) called = functions.called;
    });
  }
  return called;
}

Judgement judge(const WalkedGlobal& global) {
  if (global.kind == WalkedGlobal::Kind::extension) {
    return {Verdict::dangerous, "an extension code: only the loading program knows its meaning"};
  }
  if (global.kind == WalkedGlobal::Kind::computed) {
    return {Verdict::dangerous,
            "a name that the pickle computes, so that it is not known before it is loaded"};
  }
  if (global.is_changed) {
    return {Verdict::dangerous, "the pickle changes the class or module itself"};
  }
  // A `getattr` that only makes constants: the constants are judged instead.
  if (!global.escapes) return {Verdict::plain};
  const Judgement judgement = judge(global.module, global.name);
  if (judgement.verdict == Verdict::dangerous) return judgement;
  if (global.calls_unknown) {
    return {Verdict::dangerous, "calls a function that the pickle computes"};
  }
  if (global.is_result_called && !makes_a_plain_class(global)) {
    return {Verdict::dangerous, "the pickle calls what this returns"};
  }
  return judgement;
}

}  // namespace tessera::inspect
