// This file tests memory that the operating system refuses, in a process with a limit.

package cpu_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// limited asks for more memory than the process may map, in each way that there is.
func limited() error {
	d, err := cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{64 * memory.GiB, 64 * memory.GiB}})
	if err != nil {
		return err
	}
	var statm int64
	text, err := os.ReadFile("/proc/self/statm")
	if err == nil {
		_, err = fmt.Sscan(string(text), &statm)
	}
	if err != nil {
		return err
	}
	limit := uint64(statm)*uint64(os.Getpagesize()) + 1<<30
	if err := unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
		return err
	}
	for _, ask := range []func(memory.Kind, memory.Bytes, string) (*device.Buffer, error){d.Alloc, d.Reserve} {
		_, err := ask(memory.Device, 8*memory.GiB, "parameters")
		var full *device.OutOfMemory
		if !errors.As(err, &full) || full.Refused == "" {
			return fmt.Errorf("got %v", err)
		}
		fmt.Println(err)
	}
	return nil
}

// The error names the limit of the shell, not the device's capacity, which is free.
func TestRefused(t *testing.T) {
	if os.Getenv("STOWAGE_LIMITED") != "" {
		if err := limited(); err != nil {
			fmt.Println("wrong:", err)
		}
		return
	}
	if _, err := os.Stat("/proc/self/statm"); err != nil {
		t.Skip(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestRefused$")
	cmd.Env = append(os.Environ(), "STOWAGE_LIMITED=1")
	out, err := cmd.CombinedOutput()
	text := string(out)
	if err != nil || strings.Count(text, `"parameters" asked for 8.00 GiB, which the operating system refused: this process may map `) != 2 ||
		strings.Count(text, "(ulimit -v)") != 2 || strings.Count(text, "; run it without this limit, or ask for less") != 2 || strings.Contains(text, "are free") || strings.Contains(text, "wrong") {
		t.Errorf("%v: %s", err, text)
	}
}
