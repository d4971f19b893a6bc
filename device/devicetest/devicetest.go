// Package devicetest is the conformance suite of the device contract: what the
// comments of package device promise, as tests that every device passes.
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
// Each test opens a device of its own and closes it with both kinds of memory
// at zero, so the order of tests does not matter; a device whose opening is
// slow keeps what is slow alive in its TestMain, where it also puts
// goleak.VerifyTestMain.
//
// The suite asks for no more than the contract gives. In particular it holds
// for a device that puts work off until the host waits for it and then executes
// one operation at a time in any allowed order: no test waits for progress
// without Sync or Done, nor needs two streams to run at the same time, nor lets
// a host callback wait for anything but the test itself.
//
// This file owns the list of tests and the options; env.go what tests are
// written with; each further file one subject.
package devicetest

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
)

// Option tells the suite what else a device can do.
type Option func(*suite)

// Limited adds the tests that fill memory up: open must return a device that
// hands out at most the given bytes of each kind.
func Limited(open func(t *testing.T, capacity [device.Kinds]device.Bytes) device.Device) Option {
	return func(s *suite) {
		s.limited = func(t testing.TB, c [device.Kinds]device.Bytes) device.Device { return open(t.(*testing.T), c) }
	}
}

// LaunchesAllocateNothing adds the test that a launch leaves the Go heap alone.
func LaunchesAllocateNothing() Option {
	return func(s *suite) { s.noAllocs = true }
}

// suite is how to get devices, and what to expect of them.
type suite struct {
	open     func(testing.TB) device.Device
	limited  func(testing.TB, [device.Kinds]device.Bytes) device.Device
	noAllocs bool
	patience patience
}

// Run runs the suite; open is called for every test.
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

// testCase is one test; it opens a device unless it wants a limited one.
type testCase struct {
	name  string
	fn    func(*env)
	limit *[device.Kinds]device.Bytes
}

type group struct {
	name  string
	cases []testCase
}

// run gives a test its device and looks after both.
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

// groups lists the suite, with the tests that options add.
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
