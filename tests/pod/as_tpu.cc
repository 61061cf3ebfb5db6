// Makes the CPU act as the cores of a TPU: a PJRT plugin that wraps the pod's plugin, `plugin.cc`. TorchTPU loads it if
// TPU_LIBRARY_PATH names it. It replaces three functions of the inner plugin:
//
// - It creates the client without options that only libtpu knows, such as premapped_buffer_size. TorchTPU has one
//   process for each core, so each process is a host of the pod with one core: host RANK of WORLD_SIZE hosts. The
//   processes connect through a folder whose name contains MASTER_PORT.
// - TorchTPU compiles each immediately computed operation for the cores of all processes, although only one process
//   runs it. On a TPU this core runs its own part, but the pod would wait for the others. So a program that doesn't
//   mention several cores is compiled for this process's core alone.
// - TorchTPU asks which memory contains a program's results. XLA's CPU client doesn't implement this; the answer is:
//   the device.
//
// AS_TPU_INNER  the path of the pod's plugin
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "pjrt_c_api.h"

namespace {

const PJRT_Api* pod;  // the inner plugin
int own_core;

std::string given(const char* name, const std::string& otherwise) {
  const char* text = getenv(name);
  return text ? text : otherwise;
}

PJRT_Error* create_client(PJRT_Client_Create_Args* args) {
  const std::string folder = "/tmp/as-tpu-" + given("MASTER_PORT", "of-" + std::to_string(getpid()));
  own_core = std::stoi(given("RANK", "0"));
  mkdir(folder.c_str(), 0700);
  setenv("POD_HOSTS", given("WORLD_SIZE", "1").c_str(), 1);
  setenv("POD_HOST", given("RANK", "0").c_str(), 1);
  setenv("POD_CORES", "1", 1);
  setenv("POD_FOLDER", folder.c_str(), 1);
  PJRT_Client_Create_Args inner = *args;
  inner.create_options = nullptr;
  inner.num_options = 0;
  PJRT_Error* error = pod->PJRT_Client_Create(&inner);
  args->client = inner.client;
  rmdir(folder.c_str());  // succeeds for the last process that leaves
  for (const char* name : {"POD_HOSTS", "POD_HOST", "POD_CORES", "POD_FOLDER"}) unsetenv(name);
  return error;
}

// The part of protocol buffers that is needed to change fields of a message.
uint64_t take_number(const std::string& bytes, size_t* at) {
  uint64_t number = 0;
  for (int shift = 0;; shift += 7) {
    const uint64_t byte = static_cast<unsigned char>(bytes[(*at)++]);
    number |= (byte & 127) << shift;
    if (byte < 128) return number;
  }
}

std::string as_number(uint64_t number) {
  std::string bytes;
  for (; number > 127; number >>= 7) bytes.push_back(static_cast<char>(number & 127 | 128));
  bytes.push_back(static_cast<char>(number));
  return bytes;
}

std::string as_field(uint64_t field, uint64_t number) { return as_number(field << 3) + as_number(number); }

std::string as_field(uint64_t field, const std::string& bytes) {
  return as_number(field << 3 | 2) + as_number(bytes.size()) + bytes;
}

// Returns a message without some of its fields; stores one of these fields in `found`, if given.
std::string without(const std::string& message, const std::set<uint64_t>& fields, std::string* found = nullptr) {
  std::string rest;
  for (size_t at = 0; at < message.size();) {
    const size_t begin = at;
    const uint64_t tag = take_number(message, &at);
    const uint64_t kind = tag & 7;
    const uint64_t number = kind == 1 ? 8 : kind == 5 ? 4 : take_number(message, &at);
    if (kind == 2 && found && fields.count(tag >> 3)) *found = message.substr(at, number);
    if (kind) at += number;
    if (!fields.count(tag >> 3)) rest += message.substr(begin, at - begin);
  }
  return rest;
}

// CompileOptionsProto of XLA's pjrt/proto/compile_options.proto, for one replica and one partition on a device.
std::string for_one(const std::string& options, int device) {
  std::string build;
  const std::string others = without(options, {3}, &build);
  const std::string assignment = as_field(1, 1) + as_field(2, 1) + as_field(3, as_field(1, as_number(device)));
  return others + as_field(3, without(build, {4, 5, 9}) + as_field(4, 1) + as_field(5, 1) + as_field(9, assignment));
}

PJRT_Error* compile(PJRT_Client_Compile_Args* args) {
  const std::string code(args->program->code, args->program->code_size);
  for (const char* word : {"sharding", "all_reduce", "all_gather", "all_to_all", "collective_", "reduce_scatter", "partition_id"})
    if (code.find(word) != std::string::npos) return pod->PJRT_Client_Compile(args);
  PJRT_Client_Compile_Args own = *args;
  const std::string options = for_one(std::string(args->compile_options, args->compile_options_size), own_core);
  own.compile_options = options.data();
  own.compile_options_size = options.size();
  PJRT_Error* error = pod->PJRT_Client_Compile(&own);
  args->executable = own.executable;
  return error;
}

// The answers of `memory_kinds`, which must outlive the call, by the program's number of results.
struct Kinds {
  std::vector<const char*> names;
  std::vector<size_t> sizes;
};
std::mutex lock;
std::map<size_t, Kinds> kinds;

PJRT_Error* memory_kinds(PJRT_Executable_OutputMemoryKinds_Args* args) {
  PJRT_Executable_NumOutputs_Args count;
  memset(&count, 0, sizeof count);
  count.struct_size = PJRT_Executable_NumOutputs_Args_STRUCT_SIZE;
  count.executable = args->executable;
  if (PJRT_Error* error = pod->PJRT_Executable_NumOutputs(&count)) return error;
  std::lock_guard<std::mutex> guard(lock);
  Kinds& found = kinds[count.num_outputs];
  found.names.resize(count.num_outputs, "device");
  found.sizes.resize(count.num_outputs, strlen("device"));
  args->num_outputs = count.num_outputs;
  args->memory_kinds = found.names.data();
  args->memory_kind_sizes = found.sizes.data();
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const PJRT_Api* GetPjrtApi() {
  alignas(16) static char table[1 << 14];  // the inner plugin's table may be longer than this header's
  auto* shown = reinterpret_cast<PJRT_Api*>(table);
  if (pod) return shown;
  void* library = dlopen(getenv("AS_TPU_INNER"), RTLD_NOW | RTLD_LOCAL);
  if (!library) return nullptr;
  pod = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"))();
  memcpy(table, pod, pod->struct_size);
  shown->PJRT_Client_Create = create_client;
  shown->PJRT_Client_Compile = compile;
  shown->PJRT_Executable_OutputMemoryKinds = memory_kinds;
  return shown;
}
