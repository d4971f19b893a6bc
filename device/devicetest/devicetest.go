// Package devicetest tests that a device keeps the contract of package device. Every
// implementation of [device.Device], wrappers included, runs it in one test:
//
//	func TestConformance(t *testing.T) {
//		devicetest.Run(t, func(t *testing.T) device.Device {
//			d, err := cpu.Open(cpu.Options{})
//			if err != nil {
//				t.Fatal(err)
//			}
//			return d
//		})
//	}
//
// Each test opens a device of its own and closes it with no memory left, so the order of
// tests does not matter. A device that is slow to open keeps the slow part alive in its
// TestMain, which should also call goleak.VerifyTestMain.
//
// The suite demands no more than the contract. It passes on a device that delays work
// until the host waits for it and then executes one operation at a time in any allowed
// order: no test waits for progress without Sync or Done, needs two streams to run at the
// same time, or lets a host callback wait for anything but the test itself.
package devicetest

// This file owns the list of tests and the options; env.go what tests are written with;
// each further file one subject.

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Option adds tests that not every device can pass.
type Option func(*suite)

// Limited adds the tests that fill the memory. Open must return a device with the given
// capacity of each kind.
func Limited(open func(t *testing.T, capacity [memory.Kinds]memory.Bytes) device.Device) Option {
	return func(s *suite) {
		s.limited = func(t testing.TB, c [memory.Kinds]memory.Bytes) device.Device { return open(t.(*testing.T), c) }
	}
}

// LaunchesAllocateNothing adds the test that a launch allocates nothing on the Go heap.
func LaunchesAllocateNothing() Option {
	return func(s *suite) { s.noAllocs = true }
}

// suite says how to open devices and what to expect of them.
type suite struct {
	open     func(testing.TB) device.Device
	limited  func(testing.TB, [memory.Kinds]memory.Bytes) device.Device
	noAllocs bool
	patience patience
}

// Run runs the suite as subtests of t. It calls open once for every test; open must return
// a new device, which the test closes, or call t.Skip if there is none.
func Run(t *testing.T, open func(t *testing.T) device.Device, opts ...Option) {
	s := &suite{open: func(t testing.TB) device.Device { return open(t.(*testing.T)) }, patience: usualPatience}
	for _, o := range opts {
		o(s)
	}
	for _, g := range s.groups() {
		t.Run(g.name, func(t *testing.T) {
			for _, c := range g.cases {
				t.Run(c.name, func(t *testing.T) { s.run(t, c) })
			}
		})
	}
}

// testCase is one test. It gets a device of limited capacity if limit is set.
type testCase struct {
	name  string
	fn    func(*env)
	limit *[memory.Kinds]memory.Bytes
}

type group struct {
	name  string
	cases []testCase
}

// run opens a device for a test, runs the test and cleans up.
func (s *suite) run(t testing.TB, c testCase) {
	var d device.Device
	if c.limit != nil {
		d = s.limited(t, *c.limit)
	} else {
		d = s.open(t)
	}
	e := &env{TB: t, dev: d, patience: s.patience, another: func() device.Device { return s.open(t) }}
	e.guard("the test", func() { c.fn(e) })
	e.guard("cleaning up", e.finish)
}

// groups returns all tests, with those that options add.
func (s *suite) groups() []group {
	memory := memoryCases
	if s.limited != nil {
		memory = append(memory[:len(memory):len(memory)], limitedCases...)
	}
	launch := launchCases
	if s.noAllocs {
		launch = append(launch[:len(launch):len(launch)], launchAllocCases...)
	}
	return []group{
		{"Device", deviceCases},
		{"Memory", memory},
		{"Reserve", reserveCases},
		{"Backdrop", backdropCases},
		{"Free", freeCases},
		{"Copy", copyCases},
		{"Pieces", piecesCases},
		{"Order", orderCases},
		{"Event", eventCases},
		{"Launch", launch},
		{"Capture", captureCases},
		{"Refusal", refusalCases},
		{"Fork", forkCases},
		{"External", externalCases},
		{"Graph", graphCases},
		{"Misuse", misuseCases},
		{"Concurrent", concurrentCases},
		{"Random", randomCases},
	}
}
