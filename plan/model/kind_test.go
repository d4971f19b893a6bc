// This file owns the tests of kinds of layers.

package model

import (
	"reflect"
	"testing"
)

// Every part of a layer makes another kind, even an empty one.
func TestKindSeesEveryPart(t *testing.T) {
	seen := map[Kind]string{KindOf(Layer{}): "nothing"}
	for i := range reflect.TypeFor[Layer]().NumField() {
		var l Layer
		f := reflect.ValueOf(&l).Elem().Field(i)
		f.Set(reflect.New(f.Type().Elem()))
		name := reflect.TypeFor[Layer]().Field(i).Name
		if other, ok := seen[KindOf(l)]; ok {
			t.Errorf("a layer with an empty %s is of the same kind as one with %s", name, other)
		}
		seen[KindOf(l)] = name
	}
}

// groupsOf finds equal layers wherever they are, and tells an empty part from none.
func TestGroupsOf(t *testing.T) {
	wide, narrow := &Dense{Width: 8}, &Dense{Width: 4}
	layers := []Layer{{Dense: wide}, {Dense: wide}, {Dense: narrow}, {Dense: &Dense{Width: 8}}, {}, {Dense: &Dense{}}}
	want := []group{{layers[0], 0, 3}, {layers[2], 2, 1}, {layers[4], 4, 1}, {layers[5], 5, 1}}
	got := groupsOf(layers)
	if len(got) != len(want) {
		t.Fatalf("%d groups, want %d: %+v", len(got), len(want), got)
	}
	for i, g := range got {
		if g != want[i] {
			t.Errorf("group %d is %+v, want %+v", i, g, want[i])
		}
	}
}
