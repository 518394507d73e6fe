#include "ckpt-inspect/hash_command.h"

#include <algorithm>

#include "base/size_text.h"
#include "ckpt-inspect/part_document.h"
#include "ckpt-inspect/standard_input.h"
#include "cli/json_output.h"
#include "cli/part_option.h"
#include "cli/table.h"
#include "formats/per_rank_rules.h"
#include "inspect/manifest.h"
#include "inspect/manifest_parts.h"
#include "inspect/selection_part.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

using inspect::Manifest;
using inspect::ManifestDifference;

constexpr std::uint64_t kMaxManifestNbytes = std::uint64_t{1} << 30;

std::string_view kind_name(ManifestDifference::Kind kind) {
  switch (kind) {
    case ManifestDifference::Kind::changed:
      return "changed";
    case ManifestDifference::Kind::missing:
      return "missing";
    case ManifestDifference::Kind::extra:
      return "extra";
  }
  return "";
}

std::string in_words(const Manifest::Part& part) {
  return std::to_string(part.index) + "/" + std::to_string(part.num_parts);
}

Manifest read_manifest(const std::string& path) {
  const auto check_begin = [&](std::string_view begin) {
    inspect::check_manifest_begin(begin, path);
  };
  return inspect::parse_manifest(read_text(path, kMaxManifestNbytes, check_begin), path);
}

// Reads the manifest of --check, and returns its entries that the patterns select.
Manifest read_expected(const HashOptions& options) {
  Manifest expected = read_manifest(options.manifest_path);
  if (expected.part) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = options.manifest_path}, "manifest",
                          "a manifest of all names", "part " + in_words(*expected.part),
                          "join all parts first, with --join");
  }
  const NameSelection names(options.source.patterns);
  const formats::EntrySelection selection(names);
  std::erase_if(expected.entries,
                [&](const auto& entry) { return !selection.selects(entry.name); });
  if (!names.selects_everything()) expected.files.clear();
  return expected;
}

void print_json(const formats::CheckpointReader& reader, const Manifest& manifest,
                Terminal& terminal) {
  JsonOutput json(terminal, kInspectJsonSchema);
  write_source(json, reader.format().name(), reader.contents());
  if (manifest.part) {
    json.key("part_of_manifest").begin_object();
    json.member("part", in_words(*manifest.part)).member("digest", manifest.whole_digest());
    json.member("files", manifest.part->files);
    json.end_object();
  } else {
    json.member("whole", manifest.whole_digest());
  }
  const auto write_digests = [&](std::string_view key, const auto& entries) {
    json.key(key).begin_array();
    for (const Manifest::Entry& entry : entries) {
      json.begin_object().member("name", entry.name).member("digest", entry.digest).end_object();
    }
    json.end_array();
  };
  write_digests("digests", manifest.entries);
  if (!manifest.files.empty()) write_digests("extra_files", manifest.files);
  json.finish();
}

void print_json(const std::vector<ManifestDifference>& differences, std::uint64_t num_checked,
                Terminal& terminal) {
  JsonOutput json(terminal, kInspectJsonSchema);
  json.member("equal", differences.empty()).member("checked", num_checked);
  json.key("differences").begin_array();
  for (const ManifestDifference& difference : differences) {
    json.begin_object().member("kind", kind_name(difference.kind)).member("name", difference.name);
    if (difference.is_file) json.member("extra_file", true);
    if (!difference.expected.empty()) json.member("expected", difference.expected);
    if (!difference.found.empty()) json.member("found", difference.found);
    json.end_object();
  }
  json.end_array();
  json.finish();
}

void print_differences(const std::vector<ManifestDifference>& differences,
                       std::uint64_t num_checked, Terminal& terminal) {
  using enum Table::Align;
  Table table({left, left});
  for (const ManifestDifference& difference : differences) {
    table.add_row({{std::string(kind_name(difference.kind)), Style::bad},
                   {printable(difference.name, difference.name.size() * 4) +
                    (difference.is_file ? " (extra file)" : "")}});
  }
  table.print(terminal);
  if (!differences.empty()) terminal.print("\n");
  const std::string verdict =
      differences.empty() ? terminal.styled(Style::good, "equal")
                          : terminal.styled(Style::bad, counted(differences.size(), "difference"));
  terminal.print(verdict + ": " + counted(num_checked, "name") + " checked\n");
}

void check_options(const HashOptions& options) {
  if (options.part.empty()) return;
  const bool checks = !options.manifest_path.empty();
  if (!checks && options.joined_paths.empty()) return;
  throw UsageError(std::string("--part: expected either --part or ") +
                       (checks ? "--check" : "--join") + ", found both",
                   "ckpt-inspect hash --help");
}

// Digests the selected names, or a part of them. Without patterns, part 0 also has extra files.
Manifest compute(const HashOptions& options, const formats::CheckpointReader& reader,
                 inspect::Selection selection, Terminal& terminal) {
  PartOfWork part;
  if (!options.part.empty()) {
    part = parse_part("--part", options.part, "ckpt-inspect hash --help");
    selection =
        inspect::part_of_selection(reader.contents(), selection, part.index, part.num_parts);
  }
  const std::string files = options.part.empty() ? "" : digest_of_files(files_of_part(reader));
  Manifest manifest;
  {
    Work work(terminal, "hash", inspect::manifest_nbytes(reader.contents(), selection),
              options.work);
    manifest = inspect::compute_manifest(reader, selection, work.scan_options());
  }
  if (!options.part.empty()) manifest.part = {part.index, part.num_parts, files};
  if (options.source.patterns.empty() && part.index == 0) {
    manifest.files = inspect::digest_files(source_file_system(), options.source.path,
                                           find_extra_files(reader, options.source).names());
  }
  return manifest;
}

// Joins the manifests of all parts into one.
Manifest join(const HashOptions& options, const formats::CheckpointReader& reader,
              const inspect::Selection& selection) {
  std::vector<inspect::PartOfManifest> parts;
  for (const std::string& path : options.joined_paths) parts.push_back({path, read_manifest(path)});
  Manifest joined = inspect::join_manifests(parts, reader.contents(), selection);
  const std::string files = digest_of_files(files_of_part(reader));
  for (const auto& [path, manifest] : parts) {
    if (!manifest.part || manifest.part->files == files) continue;
    throw Error::expected(
        ErrorKind::mismatch, {.path = path}, "files",
        "the digest " + files + " of the checkpoint's data files",
        manifest.part->files.empty() ? "no digest of files" : manifest.part->files,
        "changed since the part was made, or a part of another checkpoint?");
  }
  return joined;
}

}  // namespace

void add_hash_command(CommandLine& line, HashOptions& options, Terminal& terminal) {
  Command& command = line.add_command(
      "hash", "Prints a digest of each tensor and value, and one of the whole checkpoint",
      [&] { return run_hash(options, terminal); });
  command.describe(
      "A digest covers names, dtypes, shapes, elements and values. Equal contents have equal "
      "digests in every format and sharding. Digests find changes and damage, but do not protect "
      "from forgery; use ls --sha256 for that.");
  add_source_arguments(command, options.source);
  command
      .option("--check", "MANIFEST", options.manifest_path,
              "Compare with MANIFEST, the output of an earlier run (lines or JSON), and print the "
              "differences. - reads standard input")
      .option("--part", "I/N", options.part,
              "Print only part I of N (I from 0 to N-1). Other processes print the other parts, "
              "and --join joins them")
      .option("--join", "MANIFEST", options.joined_paths,
              "Join the outputs of all parts, and read no elements. Repeatable")
      .flag("--json", options.json, "Print JSON");
  add_flat_layout_option(command, options.source);
  add_as_dict_option(command, options.source.as_dict);
  add_recipe_options(command, options.source.recipe);
  add_work_options(command, options.work);
  command.example("hash step-1000 > step-1000.hash", "Save the digests")
      .example("hash step-1000 --part 0/2 > part-0", "One of two processes that share the work")
      .example("hash step-1000 --join part-0 --join part-1 > step-1000.hash",
               "Join the outputs of both: the result is what one process prints")
      .example("hash step-1000.safetensors --check step-1000.hash model",
               "Check that an export has the same model");
}

ExitCode run_hash(const HashOptions& options, Terminal& terminal) {
  check_options(options);
  const bool checks = !options.manifest_path.empty();
  if (options.manifest_path == kStandardInput && options.source.path == kStandardInput) {
    throw UsageError(
        "--check: only one of the manifest and the checkpoint can come from standard input ('-'); "
        "both are '-'",
        "ckpt-inspect hash --help");
  }
  const Manifest expected = checks ? read_expected(options) : Manifest{};
  const auto* const reader = open_source(options.source, terminal);
  const inspect::Selection selection = select_names(*reader, options.source);
  const Manifest manifest = options.joined_paths.empty()
                                ? compute(options, *reader, selection, terminal)
                                : join(options, *reader, selection);
  require_sources_unchanged();
  if (!checks) {
    if (options.json) {
      print_json(*reader, manifest, terminal);
    } else {
      terminal.print(manifest.to_text());
    }
    return ExitCode::done;
  }
  const auto differences = inspect::compare(expected, manifest);
  const std::uint64_t num_checked = expected.entries.size() + expected.files.size();
  if (options.json) {
    print_json(differences, num_checked, terminal);
  } else {
    print_differences(differences, num_checked, terminal);
  }
  return differences.empty() ? ExitCode::done : ExitCode::findings;
}

}  // namespace tessera::cli
