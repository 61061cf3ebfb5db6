// Makes processes of one machine act as a pod of TPU hosts: a PJRT plugin that wraps a plugin for the CPU.
//
// Each process is a host. Its CPU client has the cores of the whole pod and runs every program on all of them, but
// shows only the host's own cores. Before a program runs, the host fetches the program's inputs on other hosts' cores
// over a socket. Results needn't be fetched, because each host computes the results of all cores.
//
// So all hosts must start the same programs in the same order, as on a pod. If a host dies or starts no program, the
// others wait for it forever, as on a pod. If a host starts a different program, where a pod would hang or compute
// nonsense, all hosts get an error.
//
// POD_INNER        the path of the plugin for the CPU
// POD_HOST         this host's number, from 0
// POD_HOSTS        the number of hosts
// POD_CORES        the number of cores of each host
// POD_INTERLEAVED  1: a host has every POD_HOSTS-th core instead of adjacent cores
// POD_FOLDER       the folder of the sockets
// POD_FAILS        1: a program fails if another host is gone, instead of waiting for it
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "pjrt_c_api.h"

namespace {

const PJRT_Api* cpu;  // the inner plugin

int number(const char* name) {
  const char* text = getenv(name);
  return text == nullptr ? 0 : atoi(text);
}

// An argument struct of the API, empty and with its size.
template <class Args>
Args fresh(size_t size) {
  Args args;
  memset(&args, 0, sizeof args);
  args.struct_size = size;
  return args;
}
#define ARGS(Name) fresh<Name##_Args>(Name##_Args_STRUCT_SIZE)

// This plugin's own errors, in addition to the inner plugin's.
std::mutex errors_lock;
std::map<const PJRT_Error*, std::string> own_errors;

PJRT_Error* error_of(const std::string& text) {
  auto* error = reinterpret_cast<PJRT_Error*>(new char);
  std::lock_guard<std::mutex> guard(errors_lock);
  own_errors[error] = text;
  return error;
}

#define RETURN_IF_ERROR(expression) \
  if (PJRT_Error* error = (expression)) return error

int id_of(PJRT_DeviceDescription* description) {
  auto args = ARGS(PJRT_DeviceDescription_Id);
  args.device_description = description;
  cpu->PJRT_DeviceDescription_Id(&args);
  return args.id;
}

int id_of(PJRT_Device* device) {
  auto args = ARGS(PJRT_Device_GetDescription);
  args.device = device;
  cpu->PJRT_Device_GetDescription(&args);
  return id_of(args.device_description);
}

void destroy(PJRT_Buffer* buffer) {
  auto args = ARGS(PJRT_Buffer_Destroy);
  args.buffer = buffer;
  cpu->PJRT_Buffer_Destroy(&args);
}

void destroy(PJRT_Event* event) {
  auto args = ARGS(PJRT_Event_Destroy);
  args.event = event;
  cpu->PJRT_Event_Destroy(&args);
}

PJRT_Error* wait_for(PJRT_Event* event) {
  auto args = ARGS(PJRT_Event_Await);
  args.event = event;
  PJRT_Error* error = cpu->PJRT_Event_Await(&args);
  destroy(event);
  return error;
}

[[noreturn]] void hang() {
  for (;;) pause();
}

struct Lost {};

// A host is gone: a pod hangs, or its programs fail, as with POD_FAILS=1.
[[noreturn]] void lose() {
  if (getenv("POD_FAILS")) throw Lost();
  hang();
}

// The sockets to the other hosts.
class Links {
 public:
  Links(int host, int hosts, const std::string& folder) : host_(host), sockets_(hosts, -1) {
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un own = address(folder, host);
    unlink(own.sun_path);
    if (bind(listener, reinterpret_cast<sockaddr*>(&own), sizeof own) || listen(listener, hosts)) hang();
    for (int other = 0; other < host; ++other) sockets_[other] = call(address(folder, other));
    for (int other = host + 1; other < hosts; ++other) {
      int caller = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), who = 0;
      take(caller, &who, sizeof who);
      sockets_[who] = caller;
    }
    close(listener);
    unlink(own.sun_path);
  }

  // Exchange messages with another host. The host with the smaller number sends first.
  std::string exchange(int other, const std::string& message) {
    if (host_ < other) send_to(other, message);
    uint64_t size = 0;
    take(sockets_[other], &size, sizeof size);
    std::string theirs(size, '\0');
    take(sockets_[other], &theirs[0], size);
    if (host_ > other) send_to(other, message);
    return theirs;
  }

 private:
  static sockaddr_un address(const std::string& folder, int host) {
    sockaddr_un found;
    memset(&found, 0, sizeof found);
    found.sun_family = AF_UNIX;
    snprintf(found.sun_path, sizeof found.sun_path, "%s/host%d", folder.c_str(), host);
    return found;
  }

  int call(sockaddr_un who) {
    for (;; usleep(20000)) {  // until the other host listens
      int line = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (!connect(line, reinterpret_cast<sockaddr*>(&who), sizeof who)) {
        give(line, &host_, sizeof host_);
        return line;
      }
      close(line);
    }
  }

  void send_to(int other, const std::string& message) {
    uint64_t size = message.size();
    give(sockets_[other], &size, sizeof size);
    give(sockets_[other], message.data(), size);
  }

  static void give(int line, const void* bytes, size_t size) {
    for (auto* at = static_cast<const char*>(bytes); size;) {
      ssize_t sent = send(line, at, size, MSG_NOSIGNAL);
      if (sent <= 0) lose();
      at += sent, size -= sent;
    }
  }

  static void take(int line, void* bytes, size_t size) {
    for (auto* at = static_cast<char*>(bytes); size;) {
      ssize_t got = recv(line, at, size, 0);
      if (got <= 0) lose();
      at += got, size -= got;
    }
  }

  int host_;
  std::vector<int> sockets_;
};

struct Pod {
  int host = number("POD_HOST"), hosts = number("POD_HOSTS"), each = number("POD_CORES");
  bool interleaved = number("POD_INTERLEAVED");
  int cores = hosts * each;
  PJRT_Client* client = nullptr;
  std::vector<PJRT_Device*> devices, own;
  std::unique_ptr<Links> links;

  int host_of(int device) const { return interleaved ? device % hosts : device / each; }
  bool owns(int device) const { return host_of(device) == host; }
};
Pod* pod;

// The buffers on other hosts' cores, by the buffer on this host's first core: in the order of the cores.
std::mutex turn;  // of programs: one runs at a time
std::mutex lock;  // for the next two variables, held only briefly: buffers are destroyed while a program waits
std::unordered_map<PJRT_Buffer*, std::vector<PJRT_Buffer*>> elsewhere;
std::map<PJRT_LoadedExecutable*, std::vector<PJRT_Device*>> shown_devices;
long programs_run;

// Append a buffer to a message: type, number of dimensions, bytes; the dimensions; the contents.
PJRT_Error* write(PJRT_Buffer* buffer, std::string* message) {
  auto type = ARGS(PJRT_Buffer_ElementType);
  type.buffer = buffer;
  RETURN_IF_ERROR(cpu->PJRT_Buffer_ElementType(&type));
  auto shape = ARGS(PJRT_Buffer_Dimensions);
  shape.buffer = buffer;
  RETURN_IF_ERROR(cpu->PJRT_Buffer_Dimensions(&shape));
  auto copy = ARGS(PJRT_Buffer_ToHostBuffer);
  copy.src = buffer;
  RETURN_IF_ERROR(cpu->PJRT_Buffer_ToHostBuffer(&copy));  // without a destination it only returns the size
  int64_t head[] = {type.type, static_cast<int64_t>(shape.num_dims), static_cast<int64_t>(copy.dst_size)};
  message->append(reinterpret_cast<char*>(head), sizeof head);
  message->append(reinterpret_cast<const char*>(shape.dims), shape.num_dims * sizeof(int64_t));
  size_t start = message->size();
  message->resize(start + copy.dst_size);
  copy.dst = &(*message)[start];
  RETURN_IF_ERROR(cpu->PJRT_Buffer_ToHostBuffer(&copy));
  return wait_for(copy.event);
}

PJRT_Error* read(const char** message, PJRT_Device* device, PJRT_Buffer** buffer) {
  int64_t head[3];
  memcpy(head, *message, sizeof head);
  *message += sizeof head;
  std::vector<int64_t> dims(head[1]);
  memcpy(dims.data(), *message, head[1] * sizeof(int64_t));
  *message += head[1] * sizeof(int64_t);
  auto args = ARGS(PJRT_Client_BufferFromHostBuffer);
  args.client = pod->client;
  args.data = *message;
  args.type = static_cast<PJRT_Buffer_Type>(head[0]);
  args.dims = dims.data();
  args.num_dims = dims.size();
  args.device = device;
  args.host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  *message += head[2];
  RETURN_IF_ERROR(cpu->PJRT_Client_BufferFromHostBuffer(&args));
  *buffer = args.buffer;
  return wait_for(args.done_with_host_buffer);
}

// A description that distinguishes programs: the name, and the numbers of inputs and results.
std::string looks(PJRT_LoadedExecutable* program, size_t inputs, size_t* results) {
  auto whole = ARGS(PJRT_LoadedExecutable_GetExecutable);
  whole.loaded_executable = program;
  cpu->PJRT_LoadedExecutable_GetExecutable(&whole);
  auto outputs = ARGS(PJRT_Executable_NumOutputs);
  outputs.executable = whole.executable;
  cpu->PJRT_Executable_NumOutputs(&outputs);
  auto name = ARGS(PJRT_Executable_Name);
  name.executable = whole.executable;
  cpu->PJRT_Executable_Name(&name);
  std::string text(name.executable_name, name.executable_name_size);
  auto end = ARGS(PJRT_Executable_Destroy);
  end.executable = whole.executable;
  cpu->PJRT_Executable_Destroy(&end);
  *results = outputs.num_outputs;
  return text + " of " + std::to_string(inputs) + " inputs and " + std::to_string(*results) + " results";
}

bool known(PJRT_Buffer* buffer) {
  std::lock_guard<std::mutex> guard(lock);
  return elsewhere.count(buffer);
}

// Fetch the other hosts' parts of those inputs that they have sent to their cores since the last program.
PJRT_Error* fetch(const std::string& program, PJRT_Buffer* const* const* inputs, size_t count) {
  std::vector<size_t> wanted;
  std::string message = program + ", sent:";
  for (size_t i = 0; i < count; ++i) {
    if (known(inputs[0][i])) continue;
    wanted.push_back(i);
    message += " " + std::to_string(i);
  }
  const std::string title = message;
  message.push_back('\0');
  for (size_t i : wanted)
    for (size_t core = 0; core < pod->own.size(); ++core) RETURN_IF_ERROR(write(inputs[core][i], &message));
  std::vector<std::vector<PJRT_Buffer*>> found(count, std::vector<PJRT_Buffer*>(pod->cores));
  for (int other = 0; other < pod->hosts; ++other) {
    if (other == pod->host) continue;
    std::string theirs = pod->links->exchange(other, message);
    const char* at = theirs.c_str();
    if (title != at)
      return error_of("program " + std::to_string(programs_run) + " is \"" + title + "\" on host " +
                      std::to_string(pod->host) + " and \"" + at + "\" on host " + std::to_string(other));
    at += title.size() + 1;
    for (size_t i : wanted)
      for (int device = 0; device < pod->cores; ++device)
        if (pod->host_of(device) == other) RETURN_IF_ERROR(read(&at, pod->devices[device], &found[i][device]));
  }
  std::lock_guard<std::mutex> guard(lock);
  for (size_t i : wanted)
    for (int device = 0; device < pod->cores; ++device)
      if (!pod->owns(device)) elsewhere[inputs[0][i]].push_back(found[i][device]);
  ++programs_run;
  return nullptr;
}

PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  // The inner plugin has a later version, with longer structs.
  alignas(16) char room[512] = {0};
  memcpy(room, args->options, args->options->struct_size);
  auto* options = reinterpret_cast<PJRT_ExecuteOptions*>(room);
  options->struct_size = PJRT_ExecuteOptions_STRUCT_SIZE;
  auto whole = ARGS(PJRT_LoadedExecutable_Execute);
  memcpy(&whole, args, std::min<size_t>(args->struct_size, sizeof whole));
  whole.struct_size = PJRT_LoadedExecutable_Execute_Args_STRUCT_SIZE;
  whole.options = options;
  auto devices = ARGS(PJRT_LoadedExecutable_AddressableDevices);
  devices.executable = args->executable;
  RETURN_IF_ERROR(cpu->PJRT_LoadedExecutable_AddressableDevices(&devices));
  const bool of_all = static_cast<int>(devices.num_addressable_devices) == pod->cores;
  if (pod->hosts == 1 || args->execute_device || !of_all) return cpu->PJRT_LoadedExecutable_Execute(&whole);

  std::lock_guard<std::mutex> program(turn);
  size_t results = 0;
  const std::string name = looks(args->executable, args->num_args, &results);
  try {
    RETURN_IF_ERROR(fetch(name, args->argument_lists, args->num_args));
  } catch (const Lost&) {
    return error_of("another host is gone");
  }
  std::vector<std::vector<PJRT_Buffer*>> in(pod->cores), out(pod->cores, std::vector<PJRT_Buffer*>(results));
  std::vector<PJRT_Buffer* const*> ins;
  std::vector<PJRT_Buffer**> outs;
  std::vector<PJRT_Event*> done(pod->cores);
  size_t own = 0, others = 0;
  std::unique_lock<std::mutex> guard(lock);
  for (int device = 0; device < pod->cores; ++device) {
    const bool here = pod->owns(device);
    for (size_t i = 0; i < args->num_args; ++i)
      in[device].push_back(here ? args->argument_lists[own][i] : elsewhere[args->argument_lists[0][i]][others]);
    ++(here ? own : others);
    ins.push_back(in[device].data());
    outs.push_back(out[device].data());
  }
  guard.unlock();
  whole.argument_lists = ins.data();
  whole.output_lists = outs.data();
  whole.num_devices = pod->cores;
  whole.device_complete_events = done.data();
  RETURN_IF_ERROR(cpu->PJRT_LoadedExecutable_Execute(&whole));
  guard.lock();
  own = 0;
  for (int device = 0; device < pod->cores; ++device) {
    if (!pod->owns(device)) {
      for (size_t i = 0; i < results; ++i) elsewhere[out[id_of(pod->own[0])][i]].push_back(out[device][i]);
      destroy(done[device]);
      continue;
    }
    for (size_t i = 0; i < results; ++i) args->output_lists[own][i] = out[device][i];
    if (args->device_complete_events) args->device_complete_events[own] = done[device];
    else destroy(done[device]);
    ++own;
  }
  return nullptr;
}

// Destroys buffers in a separate thread. To destroy a buffer, XLA's CPU client waits for the program that will write
// over the buffer. But TorchTPU may destroy the buffer in the callback that reports it as ready, and that program
// waits for the end of the callback: a deadlock.
class Destroyer {
 public:
  void add(PJRT_Buffer* buffer) {
    std::lock_guard<std::mutex> guard(lock_);
    buffers_.push_back(buffer);
    if (!begun_) std::thread([this] { run(); }).detach();
    begun_ = true;
    added_.notify_one();
  }

  // Wait until all buffers are destroyed, or for some seconds, because a lost pod never runs its programs.
  void finish() {
    std::unique_lock<std::mutex> guard(lock_);
    done_.wait_for(guard, std::chrono::seconds(5), [this] { return buffers_.empty(); });
  }

 private:
  void run() {
    for (std::unique_lock<std::mutex> guard(lock_);;) {
      added_.wait(guard, [this] { return !buffers_.empty(); });
      PJRT_Buffer* buffer = buffers_.front();
      guard.unlock();
      destroy(buffer);
      guard.lock();
      buffers_.pop_front();
      done_.notify_all();
    }
  }

  std::mutex lock_;
  std::condition_variable added_, done_;
  std::deque<PJRT_Buffer*> buffers_;
  bool begun_ = false;
};
Destroyer* destroyer = new Destroyer;  // never deleted, because its thread runs until the process ends

PJRT_Error* destroy_client(PJRT_Client_Destroy_Args* args) {
  destroyer->finish();
  return cpu->PJRT_Client_Destroy(args);
}

PJRT_Error* destroy_buffer(PJRT_Buffer_Destroy_Args* args) {
  std::vector<PJRT_Buffer*> parts;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto found = elsewhere.find(args->buffer);
    if (found != elsewhere.end()) {
      parts.swap(found->second);
      elsewhere.erase(found);
    }
  }
  for (PJRT_Buffer* part : parts) destroyer->add(part);
  destroyer->add(args->buffer);
  return nullptr;
}

PJRT_Error* create_client(PJRT_Client_Create_Args* args) {
  pod = new Pod;
  PJRT_NamedValue cores;
  memset(&cores, 0, sizeof cores);
  cores.struct_size = PJRT_NamedValue_STRUCT_SIZE;
  cores.name = "cpu_device_count";
  cores.name_size = strlen(cores.name);
  cores.type = PJRT_NamedValue_kInt64;
  cores.int64_value = pod->cores;
  cores.value_size = 1;
  auto inner = ARGS(PJRT_Client_Create);
  inner.create_options = &cores;
  inner.num_options = 1;
  RETURN_IF_ERROR(cpu->PJRT_Client_Create(&inner));
  args->client = pod->client = inner.client;
  auto devices = ARGS(PJRT_Client_Devices);
  devices.client = pod->client;
  RETURN_IF_ERROR(cpu->PJRT_Client_Devices(&devices));
  pod->devices.resize(pod->cores);
  for (size_t i = 0; i < devices.num_devices; ++i) pod->devices[id_of(devices.devices[i])] = devices.devices[i];
  for (int device = 0; device < pod->cores; ++device)
    if (pod->owns(device)) pod->own.push_back(pod->devices[device]);
  pod->links.reset(new Links(pod->host, pod->hosts, getenv("POD_FOLDER")));
  return nullptr;
}

PJRT_Error* own_index(PJRT_Client_ProcessIndex_Args* args) {
  args->process_index = pod->host;
  return nullptr;
}

PJRT_Error* index_of(PJRT_DeviceDescription_ProcessIndex_Args* args) {
  args->process_index = pod->host_of(id_of(args->device_description));
  return nullptr;
}

PJRT_Error* own_devices(PJRT_Client_AddressableDevices_Args* args) {
  args->addressable_devices = pod->own.data();
  args->num_addressable_devices = pod->own.size();
  return nullptr;
}

PJRT_Error* is_own(PJRT_Device_IsAddressable_Args* args) {
  args->is_addressable = pod->owns(id_of(args->device));
  return nullptr;
}

PJRT_Error* programs_devices(PJRT_LoadedExecutable_AddressableDevices_Args* args) {
  RETURN_IF_ERROR(cpu->PJRT_LoadedExecutable_AddressableDevices(args));
  std::lock_guard<std::mutex> guard(lock);
  auto& shown = shown_devices[args->executable];
  shown.clear();
  for (size_t i = 0; i < args->num_addressable_devices; ++i)
    if (pod->owns(id_of(args->addressable_devices[i]))) shown.push_back(args->addressable_devices[i]);
  args->addressable_devices = shown.data();
  args->num_addressable_devices = shown.size();
  return nullptr;
}

void destroy_error(PJRT_Error_Destroy_Args* args) {
  {
    std::lock_guard<std::mutex> guard(errors_lock);
    if (own_errors.erase(args->error)) {
      delete reinterpret_cast<char*>(args->error);
      return;
    }
  }
  cpu->PJRT_Error_Destroy(args);
}

void message_of(PJRT_Error_Message_Args* args) {
  std::lock_guard<std::mutex> guard(errors_lock);
  auto found = own_errors.find(args->error);
  if (found == own_errors.end()) return cpu->PJRT_Error_Message(args);
  args->message = found->second.data();
  args->message_size = found->second.size();
}

PJRT_Error* code_of(PJRT_Error_GetCode_Args* args) {
  std::lock_guard<std::mutex> guard(errors_lock);
  if (!own_errors.count(args->error)) return cpu->PJRT_Error_GetCode(args);
  args->code = PJRT_Error_Code_ABORTED;
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const PJRT_Api* GetPjrtApi() {
  alignas(16) static char table[1 << 14];
  auto* shown = reinterpret_cast<PJRT_Api*>(table);
  if (cpu) return shown;
  void* library = dlopen(getenv("POD_INNER"), RTLD_NOW | RTLD_LOCAL);
  if (!library) return nullptr;
  cpu = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"))();
  memcpy(table, cpu, cpu->struct_size);
  shown->PJRT_Client_Create = create_client;
  shown->PJRT_Client_Destroy = destroy_client;
  shown->PJRT_Client_ProcessIndex = own_index;
  shown->PJRT_Client_AddressableDevices = own_devices;
  shown->PJRT_Device_IsAddressable = is_own;
  shown->PJRT_DeviceDescription_ProcessIndex = index_of;
  shown->PJRT_LoadedExecutable_AddressableDevices = programs_devices;
  shown->PJRT_LoadedExecutable_Execute = execute;
  shown->PJRT_Buffer_Destroy = destroy_buffer;
  shown->PJRT_Error_Destroy = destroy_error;
  shown->PJRT_Error_Message = message_of;
  shown->PJRT_Error_GetCode = code_of;
  return shown;
}
