#include "inspect/pickle_scan/known_globals.h"

namespace tessera::inspect {
namespace {

constexpr NamesOfModule kKnown[] = {
    {"_codecs", "encode"},
    {"builtins", "bytearray complex set"},
    {"collections", "Counter OrderedDict"},
    {"torch",
     "BFloat16Storage BFloat16Tensor BoolStorage BoolTensor ByteStorage ByteTensor CharStorage "
     "CharTensor ComplexDoubleStorage ComplexFloatStorage DoubleStorage DoubleTensor FloatStorage "
     "FloatTensor HalfStorage HalfTensor IntStorage IntTensor LongStorage LongTensor QInt32Storage "
     "QInt8Storage QUInt2x4Storage QUInt4x2Storage QUInt8Storage ShortStorage ShortTensor Size "
     "Tensor TypedStorage UntypedStorage device bfloat16 bits16 bits1x8 bits2x4 bits4x2 bits8 bool "
     "complex128 complex32 complex64 float16 float32 float4_e2m1fn_x2 float64 float8_e4m3fn "
     "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int1 int16 int2 int3 int32 int4 "
     "int5 int6 int64 int7 int8 qint32 qint8 quint2x4 quint4x2 quint8 uint1 uint16 uint2 uint3 "
     "uint32 uint4 uint5 uint6 uint64 uint7 uint8 per_channel_affine "
     "per_channel_affine_float_qparams per_channel_symmetric per_tensor_affine "
     "per_tensor_symmetric strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc "
     "contiguous_format channels_last channels_last_3d preserve_format"},
    {"torch._tensor", "_rebuild_from_type _rebuild_from_type_v2"},
    {"torch._utils",
     "_rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy "
     "_rebuild_meta_tensor_no_storage _rebuild_nested_tensor _rebuild_parameter "
     "_rebuild_parameter_with_state _rebuild_qtensor _rebuild_sparse_tensor "
     "_rebuild_sparse_csr_tensor _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 "
     "_rebuild_wrapper_subclass"},
    {"torch.cuda",
     "BFloat16Storage BFloat16Tensor BoolStorage BoolTensor ByteStorage ByteTensor CharStorage "
     "CharTensor ComplexDoubleStorage ComplexFloatStorage DoubleStorage DoubleTensor FloatStorage "
     "FloatTensor HalfStorage HalfTensor IntStorage IntTensor LongStorage LongTensor ShortStorage "
     "ShortTensor"},
    {"torch.cuda.sparse",
     "BFloat16Tensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor "
     "LongTensor ShortTensor"},
    {"torch.sparse",
     "BFloat16Tensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor "
     "LongTensor ShortTensor"},
    {"torch.nn.parameter", "Parameter Buffer"},
    {"torch.serialization", "_get_layout"},
    {"torch.storage", "TypedStorage UntypedStorage"},
    {"torch.jit._pickle",
     "build_intlist build_doublelist build_boollist build_tensorlist build_tensor_from_id "
     "restore_type_tag"},
    {"torch.distributed.tensor", "DTensor DeviceMesh Partial Replicate Shard"},
    {"torch.distributed._tensor.api", "DTensor"},
    {"torch.distributed._tensor.placement_types",
     "DTensorSpec Partial _Partial Replicate Shard _StridedShard TensorMeta"},
    {"torch.distributed.tensor._api", "DTensor"},
    {"torch.distributed.tensor._dtensor_spec", "DTensorSpec TensorMeta"},
    {"torch.distributed.tensor.placement_types", "Partial Replicate Shard _StridedShard"},
    {"torch.distributed.device_mesh", "DeviceMesh"},
    {"torch.distributed._mesh_layout", "_MeshLayout"},
    {"torch.distributed.checkpoint.metadata",
     "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata "
     "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo"},
    {"torch.distributed._shard.sharded_tensor.metadata",
     "TensorProperties ShardedTensorMetadata MEM_FORMAT_ENCODING"},
};

constexpr NamesOfModule kPlain[] = {
    {"argparse", "Namespace"},
    {"array", "array _array_reconstructor"},
    {"builtins",
     "ArithmeticError AssertionError AttributeError BaseException EOFError Ellipsis Exception "
     "FileExistsError FileNotFoundError FloatingPointError ImportError IndexError "
     "InterruptedError KeyError KeyboardInterrupt LookupError MemoryError NotImplemented "
     "NotImplementedError OSError OverflowError PermissionError RuntimeError StopIteration "
     "TimeoutError TypeError UnicodeDecodeError UnicodeEncodeError UnicodeError ValueError Warning "
     "ZeroDivisionError UserWarning basestring bool bytes dict float frozenset int list long "
     "object range slice str tuple unicode xrange NoneType"},
    {"collections", "ChainMap UserDict UserList UserString defaultdict deque namedtuple"},
    {"_collections", "defaultdict deque OrderedDict"},
    {"copyreg", "_reconstructor __newobj__ __newobj_ex__"},
    {"datetime", "date datetime time timedelta timezone tzinfo"},
    {"_datetime", "date datetime time timedelta timezone"},
    {"decimal", "Context Decimal ROUND_HALF_EVEN"},
    {"_decimal", "Context Decimal"},
    {"_pydecimal", "Context Decimal"},
    {"fractions", "Fraction"},
    {"_io", "BytesIO StringIO"},
    {"io", "BytesIO StringIO"},
    {"ipaddress", "IPv4Address IPv4Interface IPv4Network IPv6Address IPv6Interface IPv6Network"},
    {"logging", "getLogger Logger RootLogger"},
    {"pathlib", "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"},
    {"pathlib._local", "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"},
    {"random", "Random"},
    {"re", "_compile RegexFlag Pattern"},
    {"string", "Template"},
    {"time", "struct_time"},
    {"types", "NoneType SimpleNamespace"},
    {"typing", "Any Dict FrozenSet List Optional Set Tuple Union"},
    {"uuid", "SafeUUID UUID"},
    {"zoneinfo", "ZoneInfo ZoneInfo._unpickle"},
    {"numpy",
     "bool bool_ byte bytes_ cdouble clongdouble complex128 complex256 complex64 csingle "
     "datetime64 double dtype float128 float16 float32 float64 float96 half int16 int32 int64 int8 "
     "int_ intc intp long longdouble longlong matrix ndarray object_ recarray record short single "
     "str_ timedelta64 ubyte uint uint16 uint32 uint64 uint8 uintc uintp ulong ulonglong ushort "
     "void"},
    {"numpy.core.multiarray", "_reconstruct scalar"},
    {"numpy._core.multiarray", "_reconstruct scalar"},
    {"numpy.core.numeric", "_frombuffer"},
    {"numpy._core.numeric", "_frombuffer"},
    {"numpy.core.records", "record recarray"},
    {"numpy._core.records", "record recarray"},
    {"numpy.dtypes",
     "BoolDType ByteDType BytesDType CLongDoubleDType Complex128DType Complex64DType "
     "DateTime64DType Float16DType Float32DType Float64DType Int16DType Int32DType Int64DType "
     "Int8DType IntDType LongDType LongDoubleDType LongLongDType ObjectDType ShortDType StrDType "
     "StringDType TimeDelta64DType UByteDType UInt16DType UInt32DType UInt64DType UInt8DType "
     "UIntDType ULongDType ULongLongDType UShortDType VoidDType"},
    {"numpy.ma.core", "MaskedArray _mareconstruct"},
    {"numpy.matrixlib.defmatrix", "matrix"},
    {"numpy.random._mt19937", "MT19937"},
    {"numpy.random._pcg64", "PCG64 PCG64DXSM"},
    {"numpy.random._philox", "Philox"},
    {"numpy.random._sfc64", "SFC64"},
    {"numpy.random._pickle", "__bit_generator_ctor __generator_ctor __randomstate_ctor"},
    {"numpy.random.bit_generator", "SeedSequence"},
    {"joblib.numpy_pickle", "NumpyArrayWrapper"},
    {"torch.optim.lr_scheduler",
     "CyclicLR._exp_range_scale_fn CyclicLR._triangular2_scale_fn CyclicLR._triangular_scale_fn "
     "OneCycleLR._annealing_cos OneCycleLR._annealing_linear"},
};

constexpr CallingFunctions kCalling[] = {
    {{"torch._tensor", "_rebuild_from_type _rebuild_from_type_v2"}, 1},
    {{"numpy.random._pickle", "__bit_generator_ctor"}, 1},
    {{"numpy.random._pickle", "__generator_ctor __randomstate_ctor"}, 2},
    {{"copyreg", "__newobj__ __newobj_ex__"}, 1},
    {{"copyreg", "_reconstructor"}, 1 | 2},
    // Calls it for each key that is missing, later.
    {{"collections", "defaultdict"}, 1},
    {{"_collections", "defaultdict"}, 1},
};

// Dangerous names in torch, NumPy and other packages. The modules in kDangerousModules are
// dangerous as a whole and not repeated here.
constexpr NamesOfModule kDangerous[] = {
    {"torch", "load save compile ops classes import_ir_module import_ir_module_from_buffer"},
    {"torch", "_load_global_deps _preload_cuda_lib"},
    {"torch._C",
     "_import_ir_module _jit_script_compile PyTorchFileReader PyTorchFileWriter CompilationUnit"},
    {"torch._utils", "_augment_memory_snapshot_stack_traces _import_dotted_name try_import"},
    {"torch.cuda", "_raw_device_count_nvml _raw_device_uuid_nvml"},
    {"torch.cuda.memory", "_dump_snapshot _save_memory_usage _save_segment_usage"},
    {"torch.serialization",
     "load save _load _legacy_load _save _open_file _open_file_like _open_zipfile_reader "
     "add_safe_globals mkdtemp"},
    {"torch.storage", "_load_from_bytes"},
    {"torch.distributed.distributed_c10d",
     "_object_to_tensor _pickler _tensor_to_object _unpickler"},
    {"torch.distributed.checkpoint.state_dict_loader", "load_state_dict"},
    {"torch.distributed.optim.zero_redundancy_optimizer", "_broadcast_object"},
    {"torch.utils._pytree", "_defaultdict_deserialize enum_object_hook treespec_loads"},
    // These return any object of any module.
    {"numpy.core", "_ufunc_reconstruct"},
    {"numpy._core", "_ufunc_reconstruct"},
    {"numpy._core.function_base", "add_newdoc"},
    {"numpy.core.function_base", "add_newdoc"},
    {"numpy",
     "DataSource apply_along_axis apply_over_axes fromfile frompyfunc "
     "fromregex genfromtxt load loadtxt lookfor memmap save savetxt savez savez_compressed "
     "vectorize source"},
    {"pandas", "eval read_pickle read_csv read_json read_sql read_html read_table"},
    {"pandas.core.computation.eval", "eval"},
    {"scipy", "load"},
    {"mpmath", "identify"},
    {"mpmath.identification", "identify"},
    {"triton.language", "str_to_ty"},
    {"h5py.ipy_completer", "_retrieve_obj"},
    {"functorch.dim", "magic_trace"},
    {"yaml", "load unsafe_load full_load load_all unsafe_load_all"},
};

constexpr std::string_view kDangerousModules =
    // torch
    "torch._appdirs torch._compile torch._custom_op torch._dispatch torch._dynamo torch._export "
    "torch._functorch torch._guards torch._higher_order_ops torch._inductor torch._jit_internal "
    "torch._library torch._logging torch._numpy.testing torch._ops torch._sources "
    "torch._strobelight torch._subclasses torch._weights_only_unpickler torch.backends.xeon "
    "torch.compiler torch.contrib torch.cuda._memory_viz torch.cuda._utils torch.cuda.tunable "
    "torch.distributed._local_tensor torch.distributed._symmetric_memory "
    "torch.distributed._tools torch.distributed.checkpoint._experimental "
    "torch.distributed.checkpoint._pg_transport torch.distributed.checkpoint.format_utils "
    "torch.distributed.checkpoint.staging torch.distributed.flight_recorder "
    "torch.distributed.nn.jit torch.nn.attention._fa3 torch.nn.attention._fa4 "
    "torch.nn.utils._deprecation_utils torch.numa torch.utils._appending_byte_serializer "
    "torch.utils._content_store torch.utils._get_clean_triton torch.utils._strobelight "
    "torch.utils._traceback torch.utils.file_baton torch.utils.show_pickle "
    "torch.distributed.elastic torch.distributed.launch torch.distributed.launcher "
    "torch.distributed.rpc torch.distributed.run torch.export torch.fx "
    "torch.hub torch.jit torch.library torch.multiprocessing torch.onnx torch.package "
    "torch.profiler torch.testing torch.utils.backend_registration torch.utils.benchmark "
    "torch.utils.bottleneck torch.utils.bundled_inputs torch.utils.collect_env "
    "torch.utils._config_module torch.utils.cpp_extension torch.utils.data.datapipes "
    "torch.utils.hipify torch.utils.model_dump torch.utils.model_zoo torch.utils.viz "
    "torch.utils.throughput_benchmark "
    // NumPy
    "numpy._pytesttester numpy.compat numpy.core._internal numpy._core._internal numpy.ctypeslib "
    "numpy.distutils numpy.f2py numpy.lib numpy.testing numpy.tests "
    // packages that install, run or compile; most functions of sympy evaluate text
    "IPython ansible bpython cffi conda cython distlib fabric hydra._internal hydra.utils invoke "
    "ipykernel jedi llvmlite numba numexpr pexpect pip pipx pkg_resources plumbum psutil ptpython "
    "ptyprocess pyximport setuptools sh sympy theano torchgen triton.backends triton.compiler "
    "triton.runtime tvm uv virtualenv wheel xonsh "
    // packages that load pickles
    "cloudpickle dill joblib jsonpickle pandas.io skops zodbpickle "
    // packages that reach other machines
    "aiohttp boto3 botocore curl_cffi fsspec gdown huggingface_hub httpx paramiko pycurl requests "
    "smart_open urllib3 wget websocket websockets "
    // scanners of pickles, which a malicious file could switch off
    "fickling modelaudit modelscan picklescan";

constexpr std::string_view kStandardModules =
    "__future__ _abc _aix_support _android_support _apple_support _ast _ast_unparse "
    "_asyncio _bisect _blake2 _bootsubprocess _bz2 _codecs _codecs_cn _codecs_hk _codecs_iso2022 "
    "_codecs_jp _codecs_kr _codecs_tw _collections _collections_abc _colorize _compat_pickle "
    "_compression _contextvars _crypt _csv _ctypes _curses _curses_panel _datetime _dbm _decimal "
    "_dummy_thread _dummy_threading _elementtree _frozen_importlib _frozen_importlib_external "
    "_functools _gdbm _hashlib _heapq _hmac _imp _interpchannels _interpqueues _interpreters _io "
    "_ios_support _json _locale _lsprof _lzma _markupbase _md5 _msi _multibytecodec "
    "_multiprocessing _opcode _opcode_metadata _operator _osx_support _overlapped _pickle "
    "_posixshmem "
    "_posixsubprocess _py_abc _py_warnings _pydatetime _pydecimal _pyio _pylong _pyrepl _queue "
    "_random _remote_debugging _scproxy _sha1 _sha2 _sha256 _sha3 _sha512 _signal _sitebuiltins "
    "_socket _sqlite3 _sre _ssl _stat _statistics _string _strptime _struct _suggestions _symtable "
    "_sysconfig _thread _threading_local _tkinter _tokenize _tracemalloc _types _typing _uuid "
    "_warnings _weakref _weakrefset _winapi _wmi _zoneinfo _zstd abc aifc annotationlib "
    "antigravity "
    "argparse array ast asynchat asyncio asyncore atexit audioop base64 bdb binascii binhex bisect "
    "builtins bz2 cProfile calendar cgi cgitb chunk cmath cmd code codecs codeop collections "
    "colorsys compileall compression concurrent configparser contextlib contextvars copy copyreg "
    "crypt csv ctypes curses dataclasses datetime dbm decimal difflib dis distutils doctest "
    "dummy_threading email encodings ensurepip enum errno faulthandler fcntl filecmp fileinput "
    "fnmatch formatter fractions ftplib functools gc genericpath getopt getpass gettext glob "
    "graphlib grp gzip hashlib heapq hmac html http idlelib imaplib imghdr imp importlib inspect "
    "io "
    "ipaddress itertools json keyword lib2to3 linecache locale logging lzma macpath mailbox "
    "mailcap "
    "marshal math mimetypes mmap modulefinder msilib msvcrt multiprocessing netrc nis nntplib nt "
    "ntpath nturl2path numbers opcode operator optparse os ossaudiodev parser pathlib pdb pickle "
    "pickletools pipes pkgutil platform plistlib poplib posix posixpath pprint profile profiling "
    "pstats pty pwd py_compile pyclbr pydoc pydoc_data pyexpat queue quopri random re readline "
    "reprlib resource rlcompleter runpy sched secrets select selectors shelve shlex shutil signal "
    "site sitecustomize smtpd smtplib sndhdr socket socketserver spwd sqlite3 sre_compile "
    "sre_constants sre_parse ssl stat statistics string stringprep struct subprocess sunau symbol "
    "symtable sys sysconfig syslog tabnanny tarfile telnetlib tempfile termios test textwrap this "
    "threading time timeit tkinter token tokenize tomllib trace traceback tracemalloc tty turtle "
    "turtledemo types typing unicodedata unittest urllib usercustomize uu uuid venv warnings wave "
    "weakref webbrowser winreg winsound wsgiref xdrlib xml xmlrpc xxlimited xxlimited_35 xxsubtype "
    "zipapp zipfile zipimport zlib zoneinfo __hello__ __phello__ _ctypes_test "
    // Python 2
    "BaseHTTPServer Bastion CGIHTTPServer ConfigParser Cookie DocXMLRPCServer HTMLParser "
    "MimeWriter Queue ScrolledText SimpleHTTPServer SimpleXMLRPCServer SocketServer StringIO Tix "
    "Tkconstants Tkdnd Tkinter UserDict UserList UserString _abcoll _winreg anydbm bsddb cPickle "
    "cStringIO commands compiler cookielib dbhash dircache dl dumbdbm dummy_thread exceptions "
    "fpformat future_builtins gdbm htmlentitydefs htmllib httplib ihooks imputil md5 mhlib "
    "mimetools mimify multifile mutex new os2 popen2 posixfile repr rexec rfc822 robotparser sets "
    "sgmllib sha sre statvfs stringold strop tkColorChooser tkCommonDialog tkFileDialog tkFont "
    "tkMessageBox tkSimpleDialog thread toaiff ttk urllib2 urlparse user whichdb xmllib xmlrpclib";

constexpr std::string_view kPowerfulModules =
    "os posix nt sys subprocess builtins __builtin__ __builtins__ importlib ctypes pickle cPickle "
    "_pickle "
    "marshal shutil socket runpy pty _posixsubprocess";

constexpr std::string_view kPowerfulFunctionsOfTorchAndNumpy =
    "CUDAPluggableAllocator MTIAPluggableAllocator XPUPluggableAllocator "
    "_load_from_filelike apply_ apply_along_axis apply_over_axes dump dumps from_file fromfile "
    "fromfunction frompyfunc fromtextfile load load_library loads map2_ map_ piecewise save test "
    "tofile torch_save_to_dcp vectorize";

constexpr std::string_view kPowerfulFunctions =
    "__import__ _run_code _run_module_code _run_pip _load_from_bytes check_call check_output eval "
    "evaluate_forward_ref exec exec_ execfile execWrapper execv execve find_spec get_annotations "
    "get_type_hints getstatusoutput import_module import_string load_module loadLibrary open_code "
    "popen Popen read_pickle resolve_name run_code run_module run_path run_shell runcode "
    "runcommand runctx runsource runstring spawn spawnv system unsafe_load";

}  // namespace

std::span<const NamesOfModule> known_names() {
  return kKnown;
}
std::span<const NamesOfModule> plain_names() {
  return kPlain;
}
std::span<const CallingFunctions> calling_functions() {
  return kCalling;
}
std::span<const NamesOfModule> dangerous_names() {
  return kDangerous;
}
std::string_view dangerous_modules() {
  return kDangerousModules;
}
std::string_view standard_modules() {
  return kStandardModules;
}
std::string_view powerful_modules() {
  return kPowerfulModules;
}
std::string_view powerful_functions() {
  return kPowerfulFunctions;
}
std::string_view powerful_functions_of_torch_and_numpy() {
  return kPowerfulFunctionsOfTorchAndNumpy;
}

}  // namespace tessera::inspect
