// This file tests the binding with libraries in C, which the machine's compiler makes: one like
// MPICH, one like Open MPI, and one with the standard ABI. They write down what they were called
// with.

package mpi

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/internal/golden"
)

const stubSource = `
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef MPICH
typedef int H;
enum { status = 20, error = 16 };
#else
typedef void *H;
enum { error = 8 };
#endif
#ifdef OPEN
enum { status = 24 };
char ompi_mpi_comm_world[8], ompi_mpi_byte[8], ompi_mpi_errors_return[8];
#endif
#ifdef STANDARD
enum { status = 32 };
#endif
#ifndef MPICH
int MPI_Abi_get_version(int *a, int *b) { *a = status == 32; *b = 0; return getenv("STUB_NO_ABI") != NULL; }
#endif
static char said[8192], failing[64];
static int code, next = 100, done[8], errors[8];
char *stub_said(void) { static char all[8192]; strcpy(all, said); said[0] = 0; return all; }
void stub_fail(const char *name, int with) { strcpy(failing, name); code = with; }
void stub_done(int *list, int n, int *with) { done[7] = n; memcpy(done, list, 4 * n); memcpy(errors, with, 4 * n); }
static const char *h(uintptr_t x) {
  static char text[4][32]; static int at; char *t = text[at++ % 4];
#ifdef OPEN
  if (x == (uintptr_t)ompi_mpi_comm_world) return "WORLD";
  if (x == (uintptr_t)ompi_mpi_byte) return "BYTE";
  if (x == (uintptr_t)ompi_mpi_errors_return) return "RETURN";
#endif
  sprintf(t, "%#lx", (long)x); return t;
}
static int note(const char *name, const char *format, ...) {
  va_list v; va_start(v, format);
  sprintf(said + strlen(said), "%s ", name);
  vsprintf(said + strlen(said), format, v);
  strcat(said, "\n");
  return strcmp(name, failing) ? 0 : code;
}
#define U (uintptr_t)
int MPI_Init_thread(void *a, void *b, int want, int *have) { *have = want - (getenv("STUB_THREADS") != NULL); return note("MPI_Init_thread", "%d %d %d", a != NULL, b != NULL, want); }
int MPI_Finalize(void) { return note("MPI_Finalize", ""); }
int MPI_Get_library_version(char *t, int *n) { strcpy(t, getenv("STUB_NAME")); *n = strlen(t); return note("MPI_Get_library_version", ""); }
int MPI_Error_string(int e, char *t, int *n) { *n = sprintf(t, "it is %d", e); return 0; }
int MPI_Error_class(int e, int *c) { *c = e % 100; return 0; }
int MPI_Comm_rank(H c, int *n) { *n = 3; return note("MPI_Comm_rank", "%s", h(U c)); }
int MPI_Comm_size(H c, int *n) { *n = 5; return note("MPI_Comm_size", "%s", h(U c)); }
int MPI_Comm_dup(H c, H *d) { *d = (H)0x71; return note("MPI_Comm_dup", "%s", h(U c)); }
int MPI_Comm_free(H *c) { return note("MPI_Comm_free", "%s", h(U *c)); }
int MPI_Comm_group(H c, H *g) { *g = (H)0x72; return note("MPI_Comm_group", "%s", h(U c)); }
int MPI_Group_incl(H g, int n, int *r, H *s) { *s = (H)0x73; return note("MPI_Group_incl", "%s %d: %d %d %d", h(U g), n, r[0], r[1], r[2]); }
int MPI_Group_free(H *g) { return note("MPI_Group_free", "%s", h(U *g)); }
int MPI_Comm_create_group(H c, H g, int tag, H *d) { *d = (H)0x74; return note("MPI_Comm_create_group", "%s %s %d", h(U c), h(U g), tag); }
int MPI_Comm_set_errhandler(H c, H e) { return note("MPI_Comm_set_errhandler", "%s %s", h(U c), h(U e)); }
int MPI_Allgather(char *a, int n, H t, char *b, int m, H u, H c) {
  for (int i = 0; i < 5 * n; i++) b[i] = a[i % n] + i / n;
  return note("MPI_Allgather", "%d %s %d %s %s", n, h(U t), m, h(U u), h(U c));
}
int MPI_Isend(void *a, int n, H t, int peer, int tag, H c, H *r) { *r = (H)(long)next++; return note("MPI_Isend", "%s %d %s %d %d %s", h(U a), n, h(U t), peer, tag, h(U c)); }
int MPI_Irecv(void *a, int n, H t, int peer, int tag, H c, H *r) { *r = (H)(long)next++; return note("MPI_Irecv", "%s %d %s %d %d %s", h(U a), n, h(U t), peer, tag, h(U c)); }
int MPI_Cancel(H *r) { return note("MPI_Cancel", "%d", (int)(long)*r); }
int MPI_Testsome(int n, H *r, int *k, int *at, char *s) {
  char all[256] = "";
  for (int i = 0; i < n; i++) sprintf(all + strlen(all), " %d", (int)(long)r[i]);
  *k = done[7];
  for (int i = 0; i < done[7]; i++) { at[i] = done[i]; memset(s + i * status, 0x55, status); memcpy(s + i * status + error, errors + i, 4); }
  done[7] = 0;
  return note("MPI_Testsome", "%d:%s", n, all);
}
`

// stubLibrary is such a library.
type stubLibrary struct {
	file string
	said func() string
	fail func(name string, code int32)
	done func(list, n, errors uintptr)
}

func buildStub(t *testing.T, kind string) *stubLibrary {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("the machine has no C compiler (cc) to make a library with")
	}
	dir := t.TempDir()
	c, s := filepath.Join(dir, "stub.c"), &stubLibrary{file: filepath.Join(dir, "libmpi.so")}
	if err := os.WriteFile(c, []byte(stubSource), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cc, "-w", "-D"+kind, "-shared", "-fPIC", "-o", s.file, c).CombinedOutput(); err != nil {
		t.Skipf("the C compiler makes no library: %v: %s", err, out)
	}
	lib, err := purego.Dlopen(s.file, purego.RTLD_NOW)
	if err != nil {
		t.Fatal(err)
	}
	purego.RegisterLibFunc(&s.said, lib, "stub_said")
	purego.RegisterLibFunc(&s.fail, lib, "stub_fail")
	purego.RegisterLibFunc(&s.done, lib, "stub_done")
	return s
}

// end lets requests end at the next call of Some, with errors.
func (s *stubLibrary) end(list, errors []int32) {
	s.done(pointer(&list[0]), uintptr(len(list)), pointer(&errors[0]))
}

// start starts the library as a launcher of some processes.
func (s *stubLibrary) start(t *testing.T, env string) (*Library, error) {
	t.Helper()
	before := signalActions()
	defer before.restore()
	return Start(func(name string) string {
		return map[string]string{"STOWAGE_MPI": s.file, "OMPI_COMM_WORLD_SIZE": env}[name]
	})
}

// Every library gets the calls that it knows, each with the arguments of its ABI, and errors
// have its words.
func TestLibraries(t *testing.T) {
	for _, name := range []string{"UCX_ERROR_SIGNALS", "UCX_DEBUG_SIGNO"} {
		t.Setenv(name, "as it was")
	}
	var book strings.Builder
	for _, kind := range []string{"MPICH", "OPEN", "STANDARD"} {
		t.Setenv("STUB_NAME", "Stub of "+kind+"\nand more")
		s := buildStub(t, kind)
		l, err := s.start(t, "5")
		if err != nil {
			t.Fatal(err)
		}
		if os.Getenv("UCX_ERROR_SIGNALS") != "" || os.Getenv("UCX_DEBUG_SIGNO") != "0" {
			t.Error("UCX would take signals")
		}
		world := fmt.Sprintf("%#x", l.World)
		if kind == "OPEN" {
			world = "its own"
		}
		fmt.Fprintf(&book, "%s\n%s%s: rank %d of %d in %s, %t\n", kind, s.said(), l.Version, l.Rank, l.Size, world, l.Name == s.file)
		fmt.Fprintf(&book, "%s", useLibrary(t, l, s))
		if err := l.Finalize(); err != nil {
			t.Error(err)
		}
		fmt.Fprint(&book, s.said())
	}
	golden.Check(t, "calls.txt", book.String())
}

// useLibrary makes every call, and returns what the library was told and said.
func useLibrary(t *testing.T, l *Library, s *stubLibrary) string {
	var book strings.Builder
	say := func(what string, err error) { fmt.Fprintf(&book, "%s%s: %v\n", s.said(), what, err) }
	use := func() {
		c, err := l.Dup(l.World)
		say(fmt.Sprintf("dup %#x", c), err)
		c, err = l.Group(0x99, []int{4, 2, 7}, 31)
		say(fmt.Sprintf("group %#x", c), err)
		say("free", l.Free(0x98))
		all, err := l.Gather(0x97, []byte{10, 20}, 5)
		say(fmt.Sprint("gather ", all), err)
	}
	use()
	for _, f := range []string{"MPI_Comm_dup", "MPI_Comm_set_errhandler", "MPI_Comm_group", "MPI_Group_incl", "MPI_Comm_create_group", "MPI_Group_free", "MPI_Comm_free", "MPI_Allgather"} {
		s.fail(f, 9)
		fmt.Fprintf(&book, "%s fails\n", f)
		use()
	}
	s.fail("", 0)
	q := NewRequests[string](l)
	k, err := q.Some(nil)
	say(fmt.Sprint("some of none ", k), err)
	const at = 0x1000
	say("send", q.Send(0x96, at, 11, 1, 41, "a"))
	say("receive", q.Receive(0x96, at+1, 12, 2, 42, "b"))
	say("receive any", q.ReceiveAny(0x96, at+2, 13, 43, "c"))
	say("largest", q.Send(0x96, at, Largest, 1, 44, "d"))
	say("too large", q.Send(0x96, at, Largest+1, 1, 45, "no"))
	s.fail("MPI_Isend", 8)
	say("refused", q.Send(0x96, at, 14, 1, 46, "no"))
	s.fail("MPI_Irecv", 8)
	say("refused", q.ReceiveAny(0x96, at, 14, 46, "no"))
	say("refused", q.Receive(0x96, at, 14, 1, 46, "no"))
	s.fail("MPI_Cancel", 8)
	say("refused", q.Cancel(0))
	s.fail("MPI_Finalize", 8)
	say("refused", l.Finalize())
	s.fail("", 0)
	say("send", q.Send(0x96, at, 15, 1, 47, "e"))
	say("cancel", q.Cancel(2))
	some := func() {
		k, err := q.Some(func(token string, err error) { fmt.Fprintf(&book, "ended %s: %v\n", token, err) })
		say(fmt.Sprintf("some %d of %s", k, strings.Join(q.tokens, "")), err)
		if q.Len() != len(q.tokens) || q.Len() > 0 && q.Token(q.Len()-1) != q.tokens[len(q.tokens)-1] || strings.Join(q.tokens[len(q.tokens):cap(q.tokens)], "") != "" {
			t.Errorf("%d requests of %v are left", q.Len(), q.tokens[:cap(q.tokens)])
		}
	}
	some()
	s.end([]int32{3, 1}, []int32{5, 6})
	some()
	s.fail("MPI_Testsome", 100+l.abi.inStatus)
	s.end([]int32{0, 2}, []int32{0, 6})
	some()
	s.fail("MPI_Testsome", 7)
	some()
	s.fail("", 0)
	for i := range 9 {
		if err := q.Send(0x96, at, i, 1, 48, fmt.Sprint(i)); err != nil {
			t.Error(err)
		}
	}
	s.said()
	q.Forget(func(token string) bool { return token < "3" || token == "7" })
	some()
	// The lists were made for five requests. All of six end at once, the last with an error.
	s.fail("MPI_Testsome", 100+l.abi.inStatus)
	s.end([]int32{0, 1, 2, 3, 4, 5}, []int32{0, 0, 0, 0, 0, 6})
	some()
	s.fail("", 0)
	return book.String()
}

// A library that does not start says why, and one of another launcher is refused in words.
func TestDoesNotStart(t *testing.T) {
	for _, name := range []string{"UCX_ERROR_SIGNALS", "UCX_DEBUG_SIGNO"} {
		t.Setenv(name, "as it was")
	}
	t.Setenv("STUB_NAME", "Stub")
	s := buildStub(t, "STANDARD")
	wrong := func(want string) {
		t.Helper()
		if _, err := s.start(t, "5"); err == nil || strings.ReplaceAll(err.Error(), s.file, "LIB") != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
	for _, f := range []string{"MPI_Init_thread", "MPI_Comm_set_errhandler", "MPI_Comm_rank", "MPI_Comm_size", "MPI_Get_library_version"} {
		s.fail(f, 4)
		wrong("mpi: " + f + ": it is 4")
	}
	s.fail("", 0)
	t.Setenv("STUB_THREADS", "1")
	wrong("mpi: LIB does not let a thread other than the first one call it; install a library with thread support")
	if err := os.Unsetenv("STUB_THREADS"); err != nil {
		t.Fatal(err)
	}
	for name, do := range map[string]string{
		"Stub":           "start with that library's mpirun, or set STOWAGE_MPI to the library of this one",
		"Open MPI v5, x": "start with mpirun of Open MPI or with srun --mpi=pmix, or install MPICH, which any launcher can start",
	} {
		t.Setenv("STUB_NAME", name)
		if _, err := s.start(t, "6"); err == nil || strings.ReplaceAll(err.Error(), s.file, "LIB") != "mpi: the launcher started 6 processes, but LIB finds 5: it is the library of another MPI; "+do {
			t.Error(err)
		}
	}
	t.Setenv("STUB_NO_ABI", "1") // then it is one like MPICH
	lib, err := purego.Dlopen(s.file, purego.RTLD_NOW)
	if err != nil {
		t.Fatal(err)
	}
	if a, world := abiOf(lib); a.handle != 4 || world != 0x44000000 {
		t.Errorf("%+v, %#x", a, world)
	}
	_, err = open([]string{"libnothing.so.1", "libnothing.so.2"})
	if err == nil || !strings.Contains(err.Error(), "libnothing.so.1") || strings.Contains(err.Error(), "libnothing.so.2") {
		t.Error(err)
	}
	if l, err := open([]string{"libnothing.so.1", s.file, "libnothing.so.2"}); err != nil || l.Name != s.file {
		t.Error(err)
	}
	open, relatives := Names()
	if !slices.Equal(open, openMPI) || !slices.Equal(relatives, mpich) {
		t.Error(open, relatives)
	}
}

// Signals that a library took are given back, and its shared memory loses its name.
func TestGivenBack(t *testing.T) {
	for _, n := range []int{35, 64} { // which nobody uses here
		before := signalActions()
		changed := *before
		changed[n][0] = 1 // ignored
		changed.restore()
		if signalActions()[n] == before[n] {
			t.Errorf("signal %d cannot be ignored", n)
		}
		before.restore()
		if *signalActions() != *before {
			t.Errorf("signal %d is not given back", n)
		}
	}
	name := fmt.Sprintf("/dev/shm/vader_segment.stowage-test.%d", os.Getpid())
	f, err := os.Create(name)
	if err != nil {
		t.Skip("there is no /dev/shm: ", err)
	}
	defer os.Remove(name)
	defer f.Close()
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	m, err := syscall.Mmap(int(f.Fd()), 0, 4096, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	new(Library).Unlink()
	if _, err := os.Stat(name); err == nil {
		t.Errorf("%s is left", name)
	}
	_ = syscall.Munmap(m)
}
