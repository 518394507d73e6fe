#include "inspect/pickle_scan/pickle_scan.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "inspect/pickle_scan/global_verdict.h"
#include "inspect/pickle_scan/inflate.h"
#include "inspect/pickle_scan/pickle_walk.h"
#include "support/error_matchers.h"
#include "support/fixtures.h"
#include "support/memory_file.h"
#include "support/memory_files.h"
#include "support/temporary_directory.h"
#include "support/zip_bytes.h"

// Shows A3, E3.
namespace tessera::inspect {
namespace {

using test::MemoryFile;
using test::MemoryFiles;
using test::ThrowsError;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Words = std::multiset<std::string>;

const std::string kSystem(
    "\x80\x02"
    "cos\nsystem\nX\x02\0\0\0ls\x85R.",
    23);

Words names_with(const PickleScanReport& report, Verdict verdict) {
  Words words;
  for (const ScannedName& name : report.names) {
    if (name.verdict == verdict) words.insert(name.in_words());
  }
  return words;
}

Words problem_kinds(const PickleScanReport& report) {
  Words words;
  for (const ScanProblem& problem : report.problems) {
    words.insert(std::string(to_string(problem.kind)));
  }
  return words;
}

PickleScanReport scan_bytes(const std::string& bytes, const std::string& name = "file",
                            const PickleScanLimits& limits = {}) {
  const MemoryFiles files("/scan", {{name, bytes}});
  return scan_pickles(files, {"/scan/" + name}, limits);
}

PickleWalk walk(const std::string& bytes, const WalkLimits& limits = {}) {
  const MemoryFile file(bytes);
  return walk_pickle(file, 0, AfterBreak::go_on, limits);
}

Words words_of(const Value& list) {
  Words words;
  for (const Value& item : *list.get_if<Value::List>()) words.insert(*item.get_if<std::string>());
  return words;
}

// fixtures/pickle_scan/README.md says which published attack each file repeats.
TEST(PickleScanTest, PublishedWaysPastOtherScannersAreFound) {
  const std::string folder = test::fixture("pickle_scan");
  const std::string table_path = folder + "/expect.json";
  const Value table =
      parse_json(read_file(FileSystem::posix(), table_path, std::uint64_t{1} << 24), table_path);
  std::size_t num_files = 0;
  for (const auto& [name, row] : *table.get_if<Value::Dict>()) {
    SCOPED_TRACE(*name.get_if<std::string>());
    const PickleScanReport report =
        scan_pickles(FileSystem::posix(), {folder + "/" + *name.get_if<std::string>()});
    const Words dangerous = words_of(*row.find("dangerous"));
    const Words problems = words_of(*row.find("problems"));
    EXPECT_EQ(names_with(report, Verdict::dangerous), dangerous);
    EXPECT_EQ(names_with(report, Verdict::opaque), words_of(*row.find("opaque")));
    EXPECT_EQ(problem_kinds(report), problems);
    EXPECT_EQ(report.is_clean(), dangerous.empty() && problems.empty());
    ++num_files;
  }
  EXPECT_GT(num_files, 100u);
}

/// Returns the problems of a report. Leaves out those of tar.pt, which torch.save wrote before
/// PyTorch 0.2: it has raw tensors between its pickles, which the scan does not look at.
std::vector<ScanProblem> without_tensors_in_tars(const PickleScanReport& report) {
  std::vector<ScanProblem> problems = report.problems;
  std::erase_if(problems, [](const ScanProblem& problem) {
    return problem.path.ends_with("/tar.pt") && problem.found == "raw tensors between them" &&
           (problem.member == "tensors" || problem.member == "storages");
  });
  return problems;
}

// Scans the checkpoints that torch, DCP, safetensors and Tessera wrote for other tests.
TEST(PickleScanTest, HonestCheckpointsAreClean) {
  for (const char* const folder : {"torch_zip/valid", "dcp/valid", "dcp/v2.2", "dcp/v2.5",
                                   "dcp/v2.11", "dcp/v2.15", "safetensors/valid", "native/v1"}) {
    SCOPED_TRACE(folder);
    const PickleScanReport report = scan_pickles(FileSystem::posix(), {test::fixture(folder)});
    EXPECT_THAT(names_with(report, Verdict::dangerous), IsEmpty());
    EXPECT_THAT(without_tensors_in_tars(report), IsEmpty());
    EXPECT_GT(report.num_files, 0u);
  }
}

// accelerate saves random_states_0.pkl with torch.save, which writes a zip archive.
TEST(PickleScanTest, AnArchiveUnderANameOfPicklesIsNoBrokenPickle) {
  const std::string archive =
      read_file(FileSystem::posix(), test::fixture("torch_zip/valid/training_state.pt"),
                std::uint64_t{1} << 20);
  EXPECT_THAT(scan_bytes(archive, "random_states_0.pkl").problems, IsEmpty());
  EXPECT_THAT(problem_kinds(scan_bytes(archive.substr(0, archive.size() / 2), "cut.pkl")),
              ::testing::Contains("broken pickle"));
  // As a pickle, an archive begins with a persistent id, which ends with the first line.
  const std::string called = test::zip_bytes({{.name = "\ncos\nsystem\n(S'ls'\ntR."}});
  EXPECT_THAT(names_with(scan_bytes(called, "called.pkl"), Verdict::dangerous),
              ElementsAre("os.system"));
}

TEST(PickleScanTest, APlaceIsTheFileTheMemberAndTheByteOfTheOpcode) {
  const PickleScanReport report =
      scan_bytes(test::zip_bytes({{.name = "a/data.pkl", .data = kSystem}}));
  ASSERT_THAT(report.names, SizeIs(1));
  const ScannedName& name = report.names[0];
  EXPECT_TRUE(name.is_called);
  EXPECT_EQ(name.num_times, 1u);
  EXPECT_THAT(name.places, ElementsAre(AllOf(Field(&ScannedPlace::path, "/scan/file"),
                                             Field(&ScannedPlace::member, "a/data.pkl"),
                                             Field(&ScannedPlace::offset, 2u))));
}

TEST(PickleScanTest, ANameInManyFilesIsOneEntryWithItsFirstPlaces) {
  std::map<std::string, std::string> contents;
  for (int i = 0; i < 150; ++i) contents["f" + std::to_string(1000 + i)] = kSystem;
  std::vector<std::string> paths;
  for (const auto& [name, bytes] : contents) paths.push_back("/scan/" + name);
  const PickleScanReport report = scan_pickles(MemoryFiles("/scan", contents), paths);
  ASSERT_THAT(report.names, SizeIs(1));
  EXPECT_EQ(report.names[0].num_times, 150u);
  EXPECT_THAT(report.names[0].places, SizeIs(ScannedName::kMaxPlaces));
  EXPECT_EQ(report.num_files, 150u);
  EXPECT_EQ(report.num_pickles, 150u);
}

TEST(PickleScanTest, FoldersAreSearchedAndLinksAreNotFollowed) {
  const test::TemporaryDirectory directory;
  const test::TemporaryDirectory elsewhere;
  namespace stdfs = std::filesystem;
  stdfs::create_directories(directory / "a/b");
  std::ofstream(directory / "a/b/evil") << kSystem;
  std::ofstream(elsewhere / "evil") << kSystem;
  stdfs::create_symlink("b/evil", directory / "a/inside");
  stdfs::create_directory_symlink(directory / "a", directory / "a/b/loop");
  PickleScanReport report = scan_pickles(FileSystem::posix(), {directory.path()});
  EXPECT_EQ(report.num_files, 1u);
  EXPECT_THAT(names_with(report, Verdict::dangerous), ElementsAre("os.system"));
  EXPECT_THAT(report.problems, IsEmpty());

  stdfs::create_symlink(elsewhere / "evil", directory / "outside");
  report = scan_pickles(FileSystem::posix(), {directory.path()});
  EXPECT_EQ(report.num_files, 1u);
  EXPECT_THAT(problem_kinds(report), ElementsAre("not looked at"));
  EXPECT_THAT(report.problems[0].path, HasSubstr("outside"));
}

TEST(PickleScanTest, AMissingPathIsAnError) {
  EXPECT_THAT([] { scan_pickles(FileSystem::posix(), {"/does/not/exist"}); },
              ThrowsError(ErrorKind::not_found, "/does/not/exist"));
}

TEST(PickleScanTest, WhatALimitLeavesOutIsAProblem) {
  const test::TemporaryDirectory directory;
  std::ofstream(directory / "a") << "text";
  std::ofstream(directory / "b") << kSystem;
  const PickleScanReport report =
      scan_pickles(FileSystem::posix(), {directory.path()}, {.max_files = 1});
  EXPECT_EQ(report.num_files, 1u);
  EXPECT_THAT(problem_kinds(report), ElementsAre("not looked at"));
  EXPECT_FALSE(report.is_clean());
}

TEST(PickleScanTest, MembersOnTheSameBytesEndTheScan) {
  std::vector<test::ZipMember> members;
  std::string pickle = "\x80\x02](";
  pickle += "X";
  pickle += std::string("\0\0\x10\0", 4) + std::string(1 << 20, 'x') + "e.";
  members.push_back({.name = "first", .data = pickle});
  for (int i = 0; i < 3000; ++i) {
    members.push_back({.name = "m" + std::to_string(i),
                       .nbytes = pickle.size(),
                       .stored_nbytes = pickle.size(),
                       .header_offset = 0});
  }
  const PickleScanReport report = scan_bytes(test::zip_bytes(members));
  EXPECT_TRUE(problem_kinds(report).contains("not looked at"));
}

TEST(PickleScanTest, BytesBehindAZipArchiveAreScannedOrTold) {
  const std::string archive = test::zip_bytes({{.name = "a/data.pkl", .data = "N."}});
  EXPECT_TRUE(scan_bytes(archive).is_clean());
  EXPECT_FALSE(names_with(scan_bytes(archive + kSystem), Verdict::dangerous).empty());
  const PickleScanReport report = scan_bytes(archive + std::string(100, '\0') + kSystem);
  ASSERT_EQ(report.problems.size(), 1U);
  EXPECT_EQ(report.problems[0].found,
            "123 bytes behind it, from byte " + std::to_string(archive.size()) + " on");
}

// A gzip member of 20 bytes without content, as often as the limit, hides what follows.
TEST(PickleScanTest, ManyEmptyGzipMembersAreAProblem) {
  const std::string empty("\x1f\x8b\x08\0\0\0\0\0\0\x03\x03\0\0\0\0\0\0\0\0\0", 20);
  std::string bytes;
  for (std::size_t i = 0; i <= kMaxGzipMembers; ++i) bytes += empty;
  EXPECT_THAT(problem_kinds(scan_bytes(bytes)), ElementsAre("not looked at"));
  EXPECT_TRUE(scan_bytes(empty + empty).is_clean());
}

TEST(PickleScanTest, ArchivesThatTheScanCannotReadAreProblems) {
  const std::string rest(200, 'x');
  for (const auto& [bytes, name] : {std::pair(std::string("7z\xbc\xaf\x27\x1c\0\4", 8), "7z"),
                                    {std::string("Rar!\x1a\x07\x01\0", 8), "RAR"},
                                    {std::string("Rar!\x1a\x07\0", 7), "RAR"},
                                    {std::string("\x1f\x9d\x90"), "compress (.Z)"},
                                    {std::string("LZIP\x01"), "lzip"},
                                    {std::string("MSCF\0\0\0\0", 8), "cab"}}) {
    SCOPED_TRACE(name);
    const PickleScanReport report = scan_bytes(bytes + rest);
    EXPECT_THAT(problem_kinds(report), ElementsAre("not looked at"));
    EXPECT_EQ(report.problems[0].found, name);
    EXPECT_FALSE(report.is_clean());
  }
}

/// A `.npy` file whose header has these items, and `data` behind the header.
std::string npy(const std::string& descr, const std::string& shape, const std::string& data) {
  const std::string header =
      "{'descr': " + descr + ", 'fortran_order': False, 'shape': " + shape + ", }\n";
  const auto size = static_cast<char>(header.size());
  return std::string("\x93NUMPY\1\0", 8) + size + std::string(1, '\0') + header + data;
}

TEST(PickleScanTest, APickleBehindAnArrayOrAStreamIsFound) {
  const auto file = FileSystem::posix().open(test::fixture("torch_zip/valid/stream.pt"));
  std::string stream(file->nbytes(), '\0');
  file->read_at(0, std::as_writable_bytes(std::span(stream)));
  const std::string five(40, '\1');
  for (const std::string& before :
       {npy("'<f8'", "(5,)", five), npy("'<U1'", "(5, 2)", five), npy("'<M8[ns]'", "(5,)", five),
        npy("[('x', '<f4'), ('y', '|u1', (2, 2))]", "(5,)", five), npy("'<f8'", "()", "12345678"),
        npy("'<f8'", "(0,)", ""), npy("'|O'", "(1,)", "\x80\x02N."),
        npy("'<f8'", "(5,)", five) + npy("'<f8'", "(5,)", five), stream, stream + stream,
        stream + npy("'<f8'", "(5,)", five)}) {
    EXPECT_TRUE(scan_bytes(before).is_clean());
    const PickleScanReport report = scan_bytes(before + kSystem);
    EXPECT_THAT(names_with(report, Verdict::dangerous), ElementsAre("os.system"));
    EXPECT_THAT(report.problems, IsEmpty());
    EXPECT_EQ(report.num_pickles, scan_bytes(before).num_pickles + 1);
  }
}

TEST(PickleScanTest, AnArrayThatLooksLikeAPickleHidesNoPickleBehindIt) {
  // In the array, a pickle begins with a string that would end behind `kSystem`.
  const std::string begin("\x80\4B", 3);
  const std::string nbytes{static_cast<char>(kSystem.size()), '\0', '\0', '\0'};
  const PickleScanReport report = scan_bytes(npy("'|u1'", "(7,)", begin + nbytes) + kSystem + ".");
  EXPECT_THAT(names_with(report, Verdict::dangerous), testing::Contains("os.system"));
}

TEST(PickleScanTest, BytesBehindAPickleOrAnArrayAreAProblemUnlessScanned) {
  const std::string five(40, '\1');
  const std::string pickle("\x80\x02}U\x01nK\5s.");
  for (const std::string& bytes :
       {pickle + five + kSystem, npy("'<f8'", "(5,)", five) + five, kSystem + five,
        npy("[('x', [('y', '<f4')])]", "(5,)", five), npy("'<f8'", "(1, 0x5)", five),
        npy("'<f8'", "(99999999999, 99999999999)", five)}) {
    EXPECT_THAT(problem_kinds(scan_bytes(bytes)), ElementsAre("not looked at"));
  }
  const std::string archive = test::zip_bytes({{.name = "x/data.pkl", .data = pickle}});
  EXPECT_TRUE(scan_bytes(pickle + archive).is_clean());
}

TEST(PickleScanTest, SourceInAnArchiveOfTorchPackageIsAProblem) {
  const std::string pickle("\x80\2cmine.net\nNet\n)R.");
  const std::vector<test::ZipMember> package{{.name = "x/.data/extern_modules", .data = "os\n"},
                                             {.name = "x/mine/__init__.py", .data = "pass\n"},
                                             {.name = "x/mine/net.py", .data = "import os\n"},
                                             {.name = "x/model/model.pkl", .data = pickle}};
  const PickleScanReport report = scan_bytes(test::zip_bytes(package));
  EXPECT_THAT(names_with(report, Verdict::dangerous), ElementsAre("mine.net.Net"));
  ASSERT_THAT(report.problems, SizeIs(1));
  EXPECT_EQ(report.problems[0].member, "x/mine/__init__.py");
  EXPECT_THAT(report.problems[0].found, HasSubstr("2 modules of Python source"));
  const std::vector<test::ZipMember> no_package(package.begin() + 1, package.end());
  EXPECT_TRUE(scan_bytes(test::zip_bytes(no_package)).is_clean());
}

// Bytes of a tensor can look like the opcode INST. Without a MARK before it, this is no pickle.
TEST(PickleScanTest, NumbersThatLookLikeACallAreNoPickle) {
  const PickleScanReport report = scan_bytes(std::string("i\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(report.num_pickles, 0u);
  EXPECT_TRUE(report.is_clean());
  EXPECT_TRUE(scan_bytes("NN\x82\x07.and more").is_clean());
  EXPECT_TRUE(scan_bytes("\x82\x07u and more").is_clean());  // SETITEMS without a MARK
  EXPECT_TRUE(scan_bytes("Rios\nsystem\n)R").is_clean());    // INST without a MARK
  EXPECT_TRUE(scan_bytes("Rcos \nsystem\n)R").is_clean());   // no name of a module
  EXPECT_FALSE(scan_bytes("R(ios\nsystem\n)R").is_clean());
}

// 2^23 marks are allowed on the stack. No loader has such a limit.
TEST(PickleScanTest, APickleBehindALimitIsAProblemInAFileOfAnyName) {
  const std::string marks((std::size_t{1} << 23) + 1, '(');
  const PickleScanReport report = scan_bytes(marks + "cos\nsystem\n)R.", "model.bin");
  EXPECT_THAT(problem_kinds(report), ElementsAre("not looked at"));
}

// Each of the million TUPLEs would look at each of the million objects.
TEST(PickleWalkTest, OpcodesThatFindNoMarkTakeNoTime) {
  const std::string many(std::size_t{1} << 20, 'N');
  EXPECT_TRUE(walk(many + std::string(std::size_t{1} << 20, '1') + ".").has_stop);
}

// PROTO, then 2^20 times NONE: more than `max_objects`.
TEST(PickleWalkTest, ADeepStackEndsTheWalkWithALimit) {
  const std::string bytes = "\x80\x02" + std::string(1 << 20, 'N') + "cos\nsystem\n.";
  const PickleWalk found = walk(bytes, {.max_objects = 1000});
  ASSERT_TRUE(found.limit.has_value());
  EXPECT_EQ(found.limit->offset, 1002u);
}

TEST(PickleWalkTest, AHugeMemoSlotTakesNoMemory) {
  const std::string put = "Nr\xff\xff\xff\x7f";
  EXPECT_FALSE(walk(put + "j\xff\xff\xff\x7f.").first_break.has_value());
  EXPECT_TRUE(walk(put + "j\xff\xff\xff\x6f.").first_break.has_value());
}

/// Puts a string at a memo slot below 256, and takes it from the stack.
std::string put_text(char key, std::string_view text) {
  return "X" + std::string{static_cast<char>(text.size()), 0, 0, 0} + std::string(text) + "q" +
         key + "0";
}

// The .metadata of a large checkpoint memoizes millions of objects that are not strings or names.
TEST(PickleWalkTest, ObjectsThatTellNothingDoNotFillTheMemo) {
  std::string bytes = "\x80\x04" + put_text('\0', "os") + put_text('\1', "system");
  for (int i = 0; i < 5000; ++i) bytes += "]\x94";              // EMPTY_LIST MEMOIZE
  for (int i = 0; i < 5000; ++i) bytes += put_text('\7', "x");  // again and again at one slot
  bytes += std::string("h\0h\1\x93\x94", 6);                    // os.system, at slot 5002
  bytes += std::string("j\x8a\x13\0\0)R.", 8);                  // calls os.system
  const PickleWalk found = walk(bytes, {.max_memo_slots = 100});
  EXPECT_FALSE(found.limit.has_value());
  EXPECT_FALSE(found.first_break.has_value());
  ASSERT_THAT(found.globals, SizeIs(1));
  EXPECT_EQ(found.globals[0].module + "." + found.globals[0].name, "os.system");
  EXPECT_TRUE(found.globals[0].is_called);
}

TEST(PickleWalkTest, AFullMemoEndsTheWalkWithALimit) {
  std::string strings = "\x80\x04";
  for (int i = 0; i < 200; ++i) strings += put_text(static_cast<char>(i), "x");
  ASSERT_TRUE(walk(strings + "N.", {.max_memo_slots = 100}).limit.has_value());
  std::string lists = "\x80\x04";
  for (int i = 0; i < 200; ++i) lists += "]\x94";
  ASSERT_TRUE(walk(lists + ".", {.max_memo_keys = 100}).limit.has_value());
  EXPECT_FALSE(walk(lists + ".", {.max_memo_keys = 200}).limit.has_value());
}

TEST(PickleWalkTest, TheFirstBreakIsWhereALoaderStops) {
  const PickleWalk found = walk(
      "\x80\x02h\x07"
      "0N.");
  ASSERT_TRUE(found.first_break.has_value());
  EXPECT_EQ(found.first_break->offset, 2u);
  EXPECT_THAT(found.first_break->found, HasSubstr("7"));
  EXPECT_TRUE(found.has_stop);
}

TEST(PickleWalkTest, EveryTruncationOfAPickleKeepsWhatWasImportedBefore) {
  const std::size_t imported_at = kSystem.find("X");
  for (std::size_t nbytes = imported_at; nbytes < kSystem.size(); ++nbytes) {
    SCOPED_TRACE(nbytes);
    const PickleWalk found = walk(kSystem.substr(0, nbytes));
    EXPECT_THAT(found.globals, SizeIs(1));
    EXPECT_TRUE(found.first_break.has_value());
  }
}

/// Expects that each name in a module is dangerous, with a reason.
void expect_dangerous(std::initializer_list<std::pair<const char*, const char*>> names) {
  for (const auto& [module, name] : names) {
    SCOPED_TRACE(std::string(module) + " " + name);
    EXPECT_EQ(judge(module, name).verdict, Verdict::dangerous);
    EXPECT_FALSE(judge(module, name).reason.empty());
  }
}

TEST(GlobalVerdictTest, NamesOfTheStandardLibraryAreDangerousUnlessListed) {
  expect_dangerous({{"os", "getcwd"},
                    {"textwrap", "dedent"},
                    {"builtins", "print"},
                    {"datetime", "sys"},
                    {"collections", "_sys.modules"},
                    {"copy_reg", "pickle"},
                    {"pathlib", "os"},
                    {"xml.dom", "minidom"}});
}

// Modules of torch and NumPy import other modules. A name with dots reaches them.
TEST(GlobalVerdictTest, NamesThatGoThroughAModuleAreDangerous) {
  expect_dangerous({{"torch.distributed.checkpoint.utils", "cProfile.run"},
                    {"torch._tensor_str", "dataclasses._create_fn"},
                    {"torch.storage", "io.open"},
                    {"torch.serialization", "tarfile.bltn_open"},
                    {"torch.utils.data._utils", "atexit.register"},
                    {"torch.distributed.checkpoint.filesystem", "Path.unlink"},
                    {"torch.distributed.checkpoint.filesystem", "Path.write_text"},
                    {"numpy._core.overrides", "functools.partial"},
                    {"torch", "Tensor.apply_"},
                    {"torch._C", "TensorBase.apply_"},
                    {"torch._C", "_VariableFunctionsClass.from_file"},
                    {"torch", "FloatStorage.from_file"},
                    {"numpy", "ndarray.tofile"},
                    {"mypackage.model", "np.load"},
                    {"mypackage.model", "torch.hub.load"},
                    {"mypackage.model", "Path.unlink"}});
}

TEST(GlobalVerdictTest, MembersOfClassesAreNoWayThroughAModule) {
  for (const auto& [module, name] :
       {std::pair("torch.distributed.fsdp.api", "ShardingStrategy.FULL_SHARD"),
        {"torch._C._distributed_c10d", "ReduceOp.RedOpType.SUM"},
        {"torch.nn.attention", "SDPBackend.MATH"},
        {"torch._C", "_VariableFunctionsClass.relu"},
        {"torch._C", "TensorBase.relu"},
        {"matplotlib.path", "Path.MOVETO"},
        {"mypackage.model", "Net.Config"},
        {"mypackage.model", "Net.build"},
        {"mypackage.model", "color.RED"},
        {"\xb0\xd5=.qe", "H.n\xbc\t"}}) {
    SCOPED_TRACE(std::string(module) + " " + name);
    EXPECT_EQ(judge(module, name).verdict, Verdict::opaque);
  }
  EXPECT_EQ(judge("torch", "Tensor").verdict, Verdict::known);
  // A scheduler of PyTorch before 2.0 has this function in its state.
  EXPECT_EQ(judge("torch.optim.lr_scheduler", "OneCycleLR._annealing_cos").verdict, Verdict::plain);
}

TEST(GlobalVerdictTest, FunctionsOfTorchAndNumpyThatRunCodeAreDangerous) {
  expect_dangerous(
      {{"torch._utils", "_import_dotted_name"},
       {"torch._utils", "try_import"},
       {"torch._utils", "_augment_memory_snapshot_stack_traces"},
       {"torch", "from_file"},
       {"torch", "_preload_cuda_lib"},
       {"torch.cuda", "CUDAPluggableAllocator"},
       {"torch.cuda.memory", "CUDAPluggableAllocator"},
       {"torch.xpu.memory", "XPUPluggableAllocator"},
       {"torch.cuda._utils", "_get_cuda_library"},
       {"torch.cuda._memory_viz", "format_flamegraph"},
       {"torch._guards", "ChainedSource.get_value"},
       {"torch._numpy.testing.utils", "measure"},
       {"torch._logging._internal", "_get_module_and_submodules"},
       {"torch._strobelight.compile_time_profiler", "get_fburl"},
       {"torch.backends.xeon.run_cpu", "_CPUinfo"},
       {"torch.distributed.distributed_c10d", "_unpickler"},
       {"torch.distributed.distributed_c10d", "_unpickler.load"},
       {"torch.distributed.checkpoint", "load"},
       {"torch.distributed.checkpoint.format_utils", "torch_save_to_dcp"},
       {"torch.distributed.flight_recorder.components.builder", "build_groups_memberships"},
       {"torch.distributed.nn.jit.instantiator", "_do_instantiate_remote_module_template"},
       {"torch.distributed.optim.zero_redundancy_optimizer", "_broadcast_object"},
       {"torch.nn.utils._deprecation_utils", "lazy_deprecated_import"},
       {"torch.utils._content_store", "ContentStoreReader.read_storage"},
       {"torch.utils._pytree", "_defaultdict_deserialize"},
       {"torch.utils._traceback", "report_compile_source_on_error"},
       {"torch.utils.file_baton", "FileBaton"},
       {"numpy.core", "_ufunc_reconstruct"},
       {"numpy._core._multiarray_umath", "fromfile"},
       {"numpy._core.records", "fromfile"},
       {"numpy", "piecewise"}});
}

TEST(PickleScanTest, ACallOfWhatAnUnknownFunctionReturnsIsDangerous) {
  const std::string make =
      "\x80\x02"
      "cmypackage\nmake\nX\x02";
  const std::string text("\0\0\0ls\x85R", 7);
  EXPECT_THAT(names_with(scan_bytes(make + text + "."), Verdict::opaque),
              ElementsAre("mypackage.make"));
  EXPECT_THAT(names_with(scan_bytes(make + text + ")R."), Verdict::dangerous),
              ElementsAre("mypackage.make"));
  // From the memo, and through another call.
  EXPECT_THAT(names_with(scan_bytes(make + text + std::string("q\0h\0)R.", 7)), Verdict::dangerous),
              ElementsAre("mypackage.make"));
  EXPECT_THAT(names_with(scan_bytes(make + text + ")R)\x81."), Verdict::dangerous),
              ElementsAre("mypackage.make"));
}

TEST(GlobalVerdictTest, VerdictsFollowTheTables) {
  EXPECT_EQ(judge("torch", "FloatStorage").verdict, Verdict::known);
  EXPECT_EQ(judge("__builtin__", "set").verdict, Verdict::known);
  EXPECT_EQ(judge("collections", "deque").verdict, Verdict::plain);
  EXPECT_EQ(judge("copy_reg", "_reconstructor").verdict, Verdict::plain);
  EXPECT_EQ(judge("re", "RegexFlag.IGNORECASE").verdict, Verdict::plain);
  EXPECT_EQ(judge("re", "RegexFlag.IGNORECASE.value").verdict, Verdict::dangerous);
  EXPECT_EQ(judge("torch.nn.modules.linear", "Linear").verdict, Verdict::opaque);
  EXPECT_EQ(judge("__main__", "Config").verdict, Verdict::opaque);
  EXPECT_EQ(judge("__main__", "os").verdict, Verdict::dangerous);
  EXPECT_EQ(judge("osmnx", "graph").verdict, Verdict::opaque);
  EXPECT_EQ(judge("torch", "hub.load").verdict, Verdict::dangerous);
  EXPECT_EQ(judge("pipeline", "main").verdict, Verdict::opaque);
}

}  // namespace
}  // namespace tessera::inspect
